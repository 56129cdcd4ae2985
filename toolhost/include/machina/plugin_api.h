// The plugin interface, version 1: the one header that a plugin includes.
//
// Host and plugin hand each other C++ objects, so the layout of every struct in these headers is binary interface:
// GCC's C++ ABI, C++17, libstdc++. Plugins compiled against Machina's headers of version 1 load unchanged. Any change
// of a member, of its type or of its order needs a new MACHINA_ABI_VERSION.
#pragma once

#include <cstdint>
#include <string>

#include "machina/registry.h"
#include "machina/tools.h"

#define MACHINA_ABI_VERSION 1

namespace machina {

// What a plugin says that it needs. The host refuses one that asks for more than the operator allows.
enum PluginCap : std::uint32_t {
    CAP_NONE = 0,
    CAP_FILE_READ = 1u << 0,
    CAP_FILE_WRITE = 1u << 1,
    CAP_SHELL = 1u << 2,
    CAP_NETWORK = 1u << 3,
    CAP_MEMORY = 1u << 4,
    CAP_GENESIS = 1u << 5,
    CAP_GPU = 1u << 6,
    CAP_ALL = 0xFFFFFFFFu,
};

// A plain function, not a ToolFn: its address is all that has to cross the boundary.
using ToolFnPtr = ToolResult (*)(const std::string& input_json, DSState& state);

// The host's side of machina_plugin_init. Virtual calls only, so that a plugin links against nothing of the host.
struct IToolRegistrar {
    virtual ~IToolRegistrar() = default;
    virtual void register_tool(const ToolDesc& desc, ToolFnPtr fn) = 0;
};

}  // namespace machina

// What a plugin exports, with C linkage:
//   extern "C" void machina_plugin_init(machina::IToolRegistrar* host);   registers every tool
//   extern "C" int machina_plugin_abi_version();                          returns MACHINA_ABI_VERSION
//   extern "C" uint32_t machina_plugin_capabilities();                    optional: PluginCap bits; without it, CAP_ALL
extern "C" {
using machina_plugin_init_fn = void (*)(machina::IToolRegistrar*);
using machina_plugin_abi_version_fn = int (*)();
using machina_plugin_capabilities_fn = std::uint32_t (*)();
}
