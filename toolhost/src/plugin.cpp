// Loads a plugin: exists, hash, dlopen, capabilities, ABI version, init, in this order.
#include "plugin.h"

#include <cerrno>
#include <cstring>
#include <dlfcn.h>
#include <fcntl.h>
#include <memory>
#include <sys/stat.h>
#include <unistd.h>

#include "capabilities.h"
#include "environment.h"
#include "io.h"
#include "sha256.h"

namespace toolhost {
namespace {

class File {
public:
    explicit File(const std::string& path) : fd_(open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
        struct stat about {};
        if (fd_ < 0 || fstat(fd_, &about) < 0) {
            const char* reason = std::strerror(errno);
            throw PluginRefused("cannot open plugin: " + path + ": " + reason);
        }
        if (!S_ISREG(about.st_mode)) {
            close(fd_);
            throw PluginRefused("plugin is not a file: " + path);
        }
    }
    ~File() { close(fd_); }
    File(const File&) = delete;
    File& operator=(const File&) = delete;

    int fd() const { return fd_; }

private:
    int fd_;
};

std::string hash_of(int fd) {
    Sha256 hash;
    char buffer[64 * 1024];
    for (ssize_t n; (n = read_some(fd, buffer, sizeof buffer)) > 0;) hash.update(buffer, static_cast<std::size_t>(n));
    return hash.hex_digest();
}

void check_hash(const std::string& path, int fd, std::string pin) {
    for (char& c : pin) {
        if (c >= 'A' && c <= 'F') c = static_cast<char>(c - 'A' + 'a');
    }
    const std::string actual = hash_of(fd);
    if (actual != pin) {
        throw PluginRefused("plugin SHA-256 mismatch: expected=" + pin + " actual=" + actual + " for " + path);
    }
}

template <typename Function>
Function exported(void* library, const char* name) {
    return reinterpret_cast<Function>(dlsym(library, name));
}

void check_capabilities(void* library, const std::string& caps) {
    const auto declares = exported<machina_plugin_capabilities_fn>(library, "machina_plugin_capabilities");
    const std::uint32_t declared = declares == nullptr ? machina::CAP_ALL : declares();
    const std::uint32_t allowed = caps.empty() ? machina::CAP_ALL : parse_capabilities(caps);
    const std::uint32_t excess = declared & ~allowed;
    if (excess == 0) return;
    throw PluginRefused("plugin capabilities exceed allowed mask: declared=" + capability_hex(declared) +
                        (declares == nullptr ? " (it declares none, which counts as all)" : "") +
                        " allowed=" + capability_hex(allowed) + " excess=" + capability_hex(excess) + " (" +
                        capability_names(excess) + ")");
}

void check_abi(void* library, const std::string& path, bool lax) {
    const auto version = exported<machina_plugin_abi_version_fn>(library, "machina_plugin_abi_version");
    if (version == nullptr) {
        if (lax) return;
        throw PluginRefused("plugin missing machina_plugin_abi_version() export: " + path +
                            " (set MACHINA_PLUGIN_ABI_LAX=1 to allow)");
    }
    if (const int theirs = version(); theirs != MACHINA_ABI_VERSION) {
        throw PluginRefused("ABI version mismatch: host=" + std::to_string(MACHINA_ABI_VERSION) +
                            " plugin=" + std::to_string(theirs) + " for " + path);
    }
}

void* open_library(const std::string& path, const File& file, bool pinned) {
    // What was hashed is what must be loaded, whatever lies at the path by now: so a pinned plugin is loaded through
    // the descriptor. Any other is loaded by its own path, where $ORIGIN and debuggers find what lies beside it.
    std::string name;
    if (pinned) {
        name = "/proc/self/fd/" + std::to_string(file.fd());
    } else {
        const std::unique_ptr<char, decltype(&std::free)> real(realpath(path.c_str(), nullptr), &std::free);
        name = real ? real.get() : path;
    }
    void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) throw PluginRefused(std::string("cannot load plugin: ") + dlerror());
    return library;
}

void initialise(void* library, const std::string& path, ToolTable& tools) {
    const auto init = exported<machina_plugin_init_fn>(library, "machina_plugin_init");
    if (init == nullptr) throw PluginRefused("plugin missing machina_plugin_init() export: " + path);
    try {
        init(&tools);
    } catch (const std::exception& e) {
        throw PluginRefused("plugin init failed: " + path + ": " + e.what());
    } catch (...) {
        throw PluginRefused("plugin init failed: " + path + ": unknown exception");
    }
}

}  // namespace

PluginPolicy PluginPolicy::from_environment() {
    return {env_text("MACHINA_PLUGIN_SHA256"), env_text("MACHINA_PLUGIN_CAPS"), env_flag("MACHINA_PLUGIN_ABI_LAX")};
}

void load_plugin(const std::string& path, const PluginPolicy& policy, ToolTable& tools) {
    const File file(path);
    const bool pinned = !policy.sha256.empty();
    if (pinned) check_hash(path, file.fd(), policy.sha256);
    void* library = open_library(path, file, pinned);
    check_capabilities(library, policy.caps);
    check_abi(library, path, policy.abi_lax);
    initialise(library, path, tools);
}

}  // namespace toolhost
