// The fault plugin: tools that do to their toolhost what a bad plugin can do. For tests only.
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <memory>
#include <thread>
#include <unistd.h>
#include <vector>

#include "input.h"

namespace {

using machina::DSState;
using machina::ToolResult;
using support::done;
using support::Input;

ToolResult segv(const std::string&, DSState&) {
    volatile std::uintptr_t nowhere = 8;
    *reinterpret_cast<volatile int*>(nowhere) = 1;
    return support::failed("survived a segmentation fault");
}

ToolResult exit_now(const Input& input, DSState&) { _exit(static_cast<int>(input.number("code", 0, 255, 1))); }

[[noreturn]] void hang() {
    for (;;) pause();
}

ToolResult hang_until_term(const std::string&, DSState&) { hang(); }

ToolResult hang_beyond_term(const std::string&, DSState&) {
    std::signal(SIGTERM, SIG_IGN);
    hang();
}

// Lines of 64 bytes, so that a report of the last lines has lines to show.
ToolResult flood_stderr(const Input& input, DSState&) {
    auto left = static_cast<std::size_t>(input.number("bytes", 0, 1 << 30, 1 << 20));
    const std::string line = std::string(63, 'e') + "\n";
    for (; left > 0; left -= std::min(left, line.size())) {
        std::fwrite(line.data(), 1, std::min(left, line.size()), stderr);
    }
    return done("{}");
}

// Outlives its toolhost, in its process group, with every pipe still open.
ToolResult leave_grandchild(const Input& input, DSState&) {
    const std::int64_t ms = input.number("ms", 0, 3'600'000, 60'000);
    const pid_t child = fork();
    if (child < 0) return support::failed("fork failed");
    if (child == 0) {
        std::this_thread::sleep_for(std::chrono::milliseconds(ms));
        _exit(0);
    }
    return done("{\"pid\":" + std::to_string(child) + "}");
}

ToolResult take_memory(const Input& input, DSState&) {
    const auto megabytes = static_cast<std::size_t>(input.number("mb", 0, 1 << 20));
    static std::vector<std::unique_ptr<char[]>> kept;
    std::vector<std::unique_ptr<char[]>> chunks;
    for (std::size_t i = 0; i < megabytes; ++i) {
        chunks.emplace_back(new char[1 << 20]);
        std::memset(chunks.back().get(), 'm', 1 << 20);
    }
    if (input.flag("keep", false)) {
        for (auto& chunk : chunks) kept.push_back(std::move(chunk));
    }
    return done("{\"mb\":" + std::to_string(megabytes) + "}");
}

// By every way there is to print.
ToolResult print_to_stdout(const Input& input, DSState&) {
    const std::string text(input.text("text"));
    std::printf("%s\n", text.c_str());
    std::fflush(stdout);
    std::cout << text << std::endl;
    if (write(STDOUT_FILENO, text.data(), text.size()) < 0) return support::failed("cannot write to stdout");
    return done("{}");
}

}  // namespace

extern "C" int machina_plugin_abi_version() { return MACHINA_ABI_VERSION; }

extern "C" std::uint32_t machina_plugin_capabilities() { return machina::CAP_NONE; }

extern "C" void machina_plugin_init(machina::IToolRegistrar* host) {
    using support::tool;
    const auto add = [&](const char* fault, machina::ToolFnPtr fn) {
        const std::string name = fault;
        host->register_tool({"AID.FAULT." + name + ".v1", "fault " + name, false, {"fault"}, {"fault"}, {}}, fn);
    };
    add("SEGV", segv);
    add("EXIT", tool<exit_now>);
    add("HANG", hang_until_term);
    add("HANG_TERM", hang_beyond_term);
    add("STDERR", tool<flood_stderr>);
    add("GRANDCHILD", tool<leave_grandchild>);
    add("MEMORY", tool<take_memory>);
    add("STDOUT", tool<print_to_stdout>);
}
