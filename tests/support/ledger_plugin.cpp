// A tool that writes down each of its runs, so that an auditor can count them. Input: "<effect> <ms> <how>".
//
// How: `ok` answers, `die` is killed after it has written the effect down. The answer is the effect, quoted.
#include <csignal>
#include <cstdlib>
#include <fcntl.h>
#include <sstream>
#include <string>
#include <unistd.h>

#include "machina/plugin_api.h"

namespace {

machina::ToolResult run(const std::string& input, machina::DSState&) {
    static const int ledger = open(std::getenv("LEDGER"), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    std::istringstream words(input);
    std::string effect, how;
    unsigned ms = 0;
    words >> effect >> ms >> how;
    const std::string line = effect + "\n";
    if (write(ledger, line.data(), line.size()) != static_cast<ssize_t>(line.size())) std::abort();
    if (ms) usleep(ms * 1000);
    if (how == "die") raise(SIGKILL);
    return {machina::StepStatus::OK, '"' + effect + '"', ""};
}

}  // namespace

extern "C" int machina_plugin_abi_version() { return MACHINA_ABI_VERSION; }

extern "C" void machina_plugin_init(machina::IToolRegistrar* host) {
    host->register_tool({"AID.TEST.LEDGER.v1", "ledger", false, {"test"}, {"ledger"}, {}}, run);
    host->register_tool({"AID.TEST.LEASED.v1", "leased", false, {"test"}, {"ledger_append"}, {}}, run);
}
