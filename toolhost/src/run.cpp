// --run: one call; all of stdin is the request.
#include <memory>
#include <new>

#include "limits.h"
#include "modes.h"
#include "reply.h"
#include "request.h"
#include "run_tool.h"
#include "state_json.h"

namespace toolhost {
namespace {

int refuse(const Protocol& protocol, int exit_code, std::string_view error, std::string_view detail = {}) {
    Text out;
    append_error(out, error, detail);
    write_all(protocol.out, out.view());
    return exit_code;
}

// False if there is more than the limit.
bool read_all(int fd, Text& input) {
    for (;;) {
        const ssize_t got = read_some(fd, input.room(kReadBytes), kReadBytes);
        if (got <= 0) return true;
        input.wrote(static_cast<std::size_t>(got));
        if (input.size() > kMaxRequestBytes) return false;
    }
}

}  // namespace

int run_once(const Protocol& protocol, ToolTable& tools, const std::string& aid) {
    const Tool* tool = tools.find(aid);
    if (tool == nullptr) return refuse(protocol, kExitNoTool, "tool not found in plugin: " + aid);
    try {
        Text input;
        if (!read_all(protocol.in, input)) {
            const std::string limit = std::to_string(kMaxRequestBytes);
            return refuse(protocol, kExitNotJson, "request over " + limit + " bytes on stdin");
        }
        const std::size_t size = input.size();
        const auto reader = std::make_unique<RequestReader>();
        Request request;
        input.room(YYJSON_PADDING_SIZE);
        if (!reader->read({input.room(0) - size, size}, request)) {
            return refuse(protocol, kExitNotJson, "invalid JSON request on stdin", reader->refusal().detail);
        }
        machina::DSState state;
        apply_state(state, request.ds_state);
        Text out;
        append_result(out, run_tool(*tool, std::string(request.input_json), state));
        append_state(out, state);
        out.append("}");
        write_all(protocol.out, out.view());
    } catch (const std::bad_alloc&) {
        Text out;
        append_result(out, {machina::StepStatus::TOOL_ERROR, "{}", "out of memory"});
        out.append("{\"slots\":{}}}");
        write_all(protocol.out, out.view());
    }
    return kExitOk;
}

}  // namespace toolhost
