// What the program says about itself.
#include "usage.h"

namespace toolhost {

const char* const kUsage = "machina_toolhost --list <plugin> | --run <plugin> <aid> | --serve <plugin> | --help";

const char* const kVersion = "machina_toolhost " TOOLHOST_VERSION " (plugin ABI 1)\n";

const char* const kHelp = R"(machina_toolhost runs the tools of a plugin: a shared object with Machina's interface.

  machina_toolhost --list <plugin>         what the plugin offers, as one JSON object
  machina_toolhost --run <plugin> <aid>    one call: all of stdin is the request, stdout the reply
  machina_toolhost --serve <plugin>        a request a line on stdin, a reply a line on stdout, in order,
                                           until an empty line or the end of input
  machina_toolhost --help | --version

Try it:
  echo '{"aid":"AID.DEMO.ECHO.v1","input_json":"{\"n\":1}"}' | machina_toolhost --serve ./demo_plugin.so

A request is a JSON object. --serve knows these members and passes over every other:
  aid               the tool (required; with --run it is the argument)
  input_json        the tool's input, JSON in a string; default "{}"
  ds_state          {"slots":{"6":{"type":…,"provenance":…,"content_json":…,"size_bytes":…}}} replaces the state;
                    with "delta":true its slots are set and its "removed_slots" erased. The state lasts until the next
                    such member.
  idempotency_key   a repeated call with this tool and key gets the first one's result, and runs nothing
  _lease_token      a permission from {"aid":"_lease.issue","tool_aid":…,"tier":0..3,"ttl_ms":…}
A reply is {"ok":…,"status":"OK|INVALID_PICK|TOOL_ERROR|BREAKER_TRIP","output_json":…,"error":…,"ds_state":…}, or
{"ok":false,"error":…} if no tool ran. "ok" is true only for status OK. What a tool prints goes to stderr.

Environment:
  MACHINA_LEASE_ENFORCE=1      tools above tier 0 need a _lease_token (--serve)
  MACHINA_IDEMP_TTL_MS=60000   how long --serve remembers the result of a keyed call (at most 1024 of them)
  MACHINA_TOOLHOST_SPIN_US=0   how long --serve looks for the next line before it sleeps, while that pays; shorter
                               waits, for a caller on another processor that asks again at once
  MACHINA_PLUGIN_SHA256=<hex>  load the plugin only if this is its hash
  MACHINA_PLUGIN_CAPS=<list>   load it only if it asks for no more than these: file_read, file_write, shell, network,
                               memory, genesis, gpu, none, all, or a mask such as 0x3; default all
  MACHINA_PLUGIN_ABI_LAX=1     load it even if it does not state its ABI version

Limits: a request has at most 10485760 bytes and 128 levels of nesting. A longer or deeper one is refused, and the next
line is served as usual.

Exit codes: 0 done (whatever the tool's status), 2 usage, 3 the plugin does not load, 4 no such tool, 5 stdin is not a
JSON object or too long. With 2 to 5 stdout has {"ok":false,"error":…}.
)";

}  // namespace toolhost
