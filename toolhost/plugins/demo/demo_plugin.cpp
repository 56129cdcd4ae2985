// The demo plugin: the tools that documentation, tests and benchmarks call.
#include <chrono>
#include <thread>
#include <unistd.h>

#include "demo_tools.h"

namespace {

using machina::DSState;
using machina::ToolResult;
using support::Input;

// Verbatim, whatever it is: the one tool that does not even read its input.
ToolResult echo(const std::string& input_json, DSState&) { return support::done(input_json); }

ToolResult sleep(const Input& input, DSState&) {
    const std::int64_t ms = input.number("ms", 0, 3'600'000);
    std::this_thread::sleep_for(std::chrono::milliseconds(ms));
    return support::done("{\"slept_ms\":" + std::to_string(ms) + "}");
}

// Of this process: shows whether two calls met the same one.
ToolResult counter(const std::string&, DSState&) {
    static std::uint64_t count = 0;
    ++count;
    return support::done("{\"count\":" + std::to_string(count) + ",\"pid\":" + std::to_string(getpid()) + "}");
}

ToolResult fail(const Input& input, DSState&) { return support::failed(std::string(input.text("error"))); }

// A JSON string of exactly as many bytes, its quotes included.
ToolResult blob(const Input& input, DSState&) {
    const auto bytes = static_cast<std::size_t>(input.number("bytes", 2, 256 * 1024 * 1024));
    std::string output(bytes, 'x');
    output.front() = output.back() = '"';
    return support::done(std::move(output));
}

}  // namespace

extern "C" int machina_plugin_abi_version() { return MACHINA_ABI_VERSION; }

extern "C" std::uint32_t machina_plugin_capabilities() { return machina::CAP_FILE_WRITE; }

extern "C" void machina_plugin_init(machina::IToolRegistrar* host) {
    using support::tool;
    host->register_tool({"AID.DEMO.ECHO.v1", "echo", true, {"demo"}, {"none"}, {}}, echo);
    host->register_tool({"AID.DEMO.SLEEP.v1", "sleep", true, {"demo"}, {"none"}, {}}, tool<sleep>);
    host->register_tool({"AID.DEMO.COUNTER.v1", "counter", false, {"demo"}, {"none"}, {}}, counter);
    host->register_tool({"AID.DEMO.STATE.v1", "state", true, {"demo"}, {"none"}, {}}, tool<demo::state>);
    host->register_tool({"AID.DEMO.FAIL.v1", "fail", true, {"demo"}, {"none"}, {}}, tool<fail>);
    host->register_tool({"AID.DEMO.BLOB.v1", "blob", true, {"demo"}, {"none"}, {}}, tool<blob>);
    host->register_tool({"AID.DEMO.WORD_COUNT.v1", "word_count", true, {"demo", "text"}, {"none"}, {}},
                        tool<demo::word_count>);
    host->register_tool({"AID.FILE.WRITE.v1", "file_write", false, {"demo", "file"}, {"file_write"}, {}},
                        tool<demo::file_write>);
}
