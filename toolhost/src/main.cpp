// machina_toolhost: picks the mode, takes the protocol away from stdin and stdout, loads the plugin, runs the mode.
#include <cstdio>
#include <string>
#include <vector>

#include "modes.h"
#include "plugin.h"
#include "reply.h"
#include "usage.h"

namespace {

using namespace toolhost;

enum class Mode { List, Run, Serve, Help, Version, Wrong };

Mode mode_of(const std::vector<std::string>& arguments) {
    const std::string mode = arguments.empty() ? "" : arguments[0];
    const std::size_t n = arguments.size();
    if (mode == "--list" && n == 2) return Mode::List;
    if (mode == "--run" && n == 3 && !arguments[2].empty()) return Mode::Run;
    if (mode == "--serve" && n == 2) return Mode::Serve;
    if (mode == "--help" || mode == "-h") return Mode::Help;
    if (mode == "--version") return Mode::Version;
    return Mode::Wrong;
}

int fail(int fd, int exit_code, const std::string& error, const char* line_end) {
    Text out;
    append_error(out, error);
    out.append(line_end);
    write_all(fd, out.view());
    return exit_code;
}

int refuse_usage(const std::vector<std::string>& arguments) {
    std::fprintf(stderr, "usage: %s\n", kUsage);
    const bool no_aid = arguments.size() >= 2 && arguments[0] == "--run" && arguments.size() <= 3;
    return fail(1, kExitUsage, std::string(no_aid ? "missing aid; usage: " : "usage: ") + kUsage, "");
}

}  // namespace

int main(int argc, char** argv) {
    const std::vector<std::string> arguments(argv + 1, argv + argc);
    const Mode mode = mode_of(arguments);
    if (mode == Mode::Wrong) return refuse_usage(arguments);
    if (mode == Mode::Help) return write_all(1, kHelp) ? kExitOk : 1;
    if (mode == Mode::Version) return write_all(1, kVersion) ? kExitOk : 1;

    const Protocol protocol = take_stdio();
    HeldReplies replies(protocol.out);
    ToolTable tools;
    try {
        load_plugin(arguments[1], PluginPolicy::from_environment(), tools);
    } catch (const std::exception& refused) {
        return fail(protocol.out, kExitPlugin, refused.what(), mode == Mode::Serve ? "\n" : "");
    }
    switch (mode) {
        case Mode::List: return list_tools(protocol, tools);
        case Mode::Run: return run_once(protocol, tools, arguments[2]);
        default: return serve(protocol, tools, replies);
    }
}
