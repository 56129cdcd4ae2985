// --list: what the plugin offers, as one JSON object.
#include "json_text.h"
#include "modes.h"
#include "text.h"

namespace toolhost {

int list_tools(const Protocol& protocol, const ToolTable& tools) {
    Text out;
    out.append("{\"ok\":true,\"tools\":[");
    bool first = true;
    for (const Tool* tool : tools.sorted_by_aid()) {
        const machina::ToolDesc& desc = tool->desc;
        out.append(first ? "{\"aid\":" : ",{\"aid\":");
        append_json_string(out, desc.aid);
        out.append(",\"name\":");
        append_json_string(out, desc.name);
        out.append(desc.deterministic ? ",\"deterministic\":true,\"tags\":" : ",\"deterministic\":false,\"tags\":");
        append_json_strings(out, desc.tags);
        out.append(",\"side_effects\":");
        append_json_strings(out, desc.side_effects);
        out.append(",\"replay_inputs\":");
        append_json_strings(out, desc.replay_inputs);
        out.append("}");
        first = false;
    }
    out.append("]}");
    write_all(protocol.out, out.view());
    return kExitOk;
}

}  // namespace toolhost
