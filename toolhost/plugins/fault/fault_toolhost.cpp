// fault_toolhost: a toolhost without a plugin that does to the wire what no plugin can do. For tests only.
//
//   fault_toolhost --list [plugin]     the faults
//   fault_toolhost --serve [plugin]    a line with AID.FAULT.<NAME>.v1 commits the fault; AID.FAULT.OK.v1 echoes
#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <unistd.h>

#include "json_text.h"
#include "limits.h"
#include "line_reader.h"
#include "modes.h"
#include "reply.h"
#include "request.h"

namespace {

using namespace toolhost;

constexpr std::int64_t kReplyCap = 1'048'576;

// A number of the input, or what holds without it.
std::int64_t number(std::string_view input_json, const char* name, std::int64_t otherwise) {
    yyjson_doc* doc = yyjson_read(input_json.data(), input_json.size(), 0);
    yyjson_val* value = yyjson_obj_get(yyjson_doc_get_root(doc), name);
    const std::int64_t number = yyjson_is_int(value) ? yyjson_get_sint(value) : otherwise;
    yyjson_doc_free(doc);
    return number;
}

std::string reply_with(std::string_view output_json) {
    Text out;
    append_result(out, {machina::StepStatus::OK, std::string(output_json), ""});
    out.append("{\"delta\":true,\"slots\":{},\"removed_slots\":[]}}");
    return std::string(out.view());
}

bool say(const std::string& bytes) { return write_all(STDOUT_FILENO, bytes); }

bool say_half(const std::string& reply) { return say(reply.substr(0, reply.size() / 2)); }

void wait_ms(std::int64_t ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

using Fault = bool (*)(std::string_view input);  // false: nobody reads any more

bool ok(std::string_view input) { return say(reply_with(input) + "\n"); }

bool junk(std::string_view) { return say("this is not JSON\n"); }

bool twice(std::string_view input) { return ok(input) && ok(input); }

bool half(std::string_view input) {
    say_half(reply_with(input));
    _exit(static_cast<int>(number(input, "code", 0)));
}

// Reads on, so that it ends with its input, but will never answer.
bool close_stdout(std::string_view) {
    close(STDOUT_FILENO);
    char dropped[4096];
    while (read_some(STDIN_FILENO, dropped, sizeof dropped) > 0) continue;
    _exit(0);
}

// A valid reply of exactly as many bytes, without the line end.
bool oversize(std::string_view input) {
    const std::size_t shortest = reply_with("").size();
    const auto bytes = static_cast<std::size_t>(std::max<std::int64_t>(number(input, "bytes", kReplyCap + 1), 0));
    return say(reply_with(std::string(std::max(bytes, shortest) - shortest, 'x')) + "\n");
}

bool segv_mid(std::string_view input) {
    say_half(reply_with(input));
    std::signal(SIGSEGV, SIG_DFL);  // a sanitizer would report it and exit
    return std::raise(SIGSEGV) != 0;
}

bool late(std::string_view input) {
    wait_ms(number(input, "ms", 60'000));
    return ok(input);
}

constexpr struct {
    std::string_view aid;
    Fault commit;
} kFaults[] = {
    {"AID.FAULT.CLOSE.v1", close_stdout}, {"AID.FAULT.HALF.v1", half},         {"AID.FAULT.JUNK.v1", junk},
    {"AID.FAULT.LATE.v1", late},          {"AID.FAULT.OK.v1", ok},             {"AID.FAULT.OVERSIZE.v1", oversize},
    {"AID.FAULT.SEGV_MID.v1", segv_mid},  {"AID.FAULT.TWICE.v1", twice},
};

int list_faults() {
    ToolTable tools;
    for (const auto& fault : kFaults) {
        const std::string aid(fault.aid);
        tools.register_tool({aid, "fault " + aid, false, {"fault"}, {"fault"}, {}},
                            [](const std::string&, machina::DSState&) { return machina::ToolResult(); });
    }
    return list_tools({STDIN_FILENO, STDOUT_FILENO}, tools);
}

bool answer(RequestReader& requests, Line line) {
    Request request;
    Text error;
    if (!requests.read(line, request)) {
        append_error(error, requests.refusal().error, requests.refusal().detail);
    } else {
        const auto fault = std::find_if(std::begin(kFaults), std::end(kFaults),
                                        [&](const auto& known) { return known.aid == request.aid; });
        if (fault != std::end(kFaults)) return fault->commit(request.input_json);
        append_error(error, std::string("tool not found: ").append(request.aid));
    }
    return say(std::string(error.view()) + "\n");
}

int serve_faults() {
    std::signal(SIGPIPE, SIG_IGN);
    LineReader lines(STDIN_FILENO, kMaxRequestBytes + kSplicedBytes);
    RequestReader requests;
    for (;;) {
        Line line;
        switch (lines.next(line)) {
            case LineReader::Next::NeedMore: lines.fill(); break;
            case LineReader::Next::Line:
                if (line.size == 0 || !answer(requests, line)) return kExitOk;
                break;
            case LineReader::Next::TooLong: say("{\"ok\":false,\"error\":\"request line too long\"}\n"); break;
            case LineReader::Next::End: return kExitOk;
        }
    }
}

}  // namespace

int main(int argc, char** argv) {
    const std::string_view mode = argc > 1 ? argv[1] : "";
    if (mode == "--list") return list_faults();
    if (mode == "--serve") return serve_faults();
    say("{\"ok\":false,\"error\":\"usage: fault_toolhost --list [plugin] | --serve [plugin]\"}");
    return kExitUsage;
}
