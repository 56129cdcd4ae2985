// Loads a plugin and collects its tools, after everything that can be checked about it has been.
#pragma once

#include <stdexcept>
#include <string>

#include "tool_table.h"

namespace toolhost {

// The plugin is not to be used; what() says why, in a sentence for the user.
struct PluginRefused : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// What the operator allows, from the environment.
struct PluginPolicy {
    std::string sha256;  // MACHINA_PLUGIN_SHA256; empty: not pinned
    std::string caps;    // MACHINA_PLUGIN_CAPS; empty: all
    bool abi_lax;        // MACHINA_PLUGIN_ABI_LAX: load a plugin that does not state its ABI version

    static PluginPolicy from_environment();
};

// The plugin stays loaded as long as the process lives. Throws PluginRefused.
void load_plugin(const std::string& path, const PluginPolicy& policy, ToolTable& tools);

}  // namespace toolhost
