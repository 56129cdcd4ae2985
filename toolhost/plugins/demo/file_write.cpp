// AID.FILE.WRITE.v1: writes a text file below the work directory, and nowhere else.
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <vector>

#include "demo_tools.h"

namespace demo {
namespace {

struct WriteFailed : std::runtime_error {
    explicit WriteFailed(const std::string& what) : std::runtime_error(what + ": " + std::strerror(errno)) {}
};

class Fd {
public:
    Fd(int fd, const std::string& what) : fd_(fd) {
        if (fd < 0) throw WriteFailed(what);
    }
    Fd(Fd&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
    Fd& operator=(Fd&& other) noexcept {
        std::swap(fd_, other.fd_);
        return *this;
    }
    ~Fd() {
        if (fd_ >= 0) close(fd_);
    }
    operator int() const { return fd_; }

private:
    int fd_;
};

constexpr int kDirectory = O_RDONLY | O_DIRECTORY | O_CLOEXEC;

// MACHINA_WORK_DIR, else "work" in the current directory.
Fd open_work_directory() {
    const char* configured = std::getenv("MACHINA_WORK_DIR");
    const std::string path = configured != nullptr && *configured != '\0' ? configured : "work";
    mkdir(path.c_str(), 0777);
    return Fd(open(path.c_str(), kDirectory), "work directory " + path);
}

std::vector<std::string> parts_of(std::string_view path) {
    if (path.empty() || path.front() == '/' || path.back() == '/' || path.find('\0') != path.npos) {
        throw support::BadInput("\"path\" must be the relative path of a file below the work directory");
    }
    std::vector<std::string> parts;
    while (!path.empty()) {
        const std::size_t slash = std::min(path.find('/'), path.size());
        const std::string_view part = path.substr(0, slash);
        path.remove_prefix(std::min(slash + 1, path.size()));
        if (part == "..") throw support::BadInput("\"path\" must not contain \"..\"");
        if (!part.empty() && part != ".") parts.emplace_back(part);
    }
    if (parts.empty()) throw support::BadInput("\"path\" must name a file");
    return parts;
}

// Part by part, following no symbolic link: none can lead out of the work directory, not even one that appears now.
Fd open_parent(const std::vector<std::string>& parts) {
    Fd directory = open_work_directory();
    for (std::size_t i = 0; i + 1 < parts.size(); ++i) {
        mkdirat(directory, parts[i].c_str(), 0777);
        directory = Fd(openat(directory, parts[i].c_str(), kDirectory | O_NOFOLLOW), "directory " + parts[i]);
    }
    return directory;
}

void write_text(int fd, std::string_view text) {
    while (!text.empty()) {
        const ssize_t wrote = write(fd, text.data(), text.size());
        if (wrote >= 0) text.remove_prefix(static_cast<std::size_t>(wrote));
        else if (errno != EINTR) throw WriteFailed("cannot write the file");
    }
}

// Readers see the old file or the new one, never a half. A link in the file's place is replaced, not followed.
void replace_file(int directory, const std::string& name, std::string_view text) {
    static std::atomic<unsigned> counter{0};
    const std::string temporary = ".tmp-" + std::to_string(getpid()) + "-" + std::to_string(++counter);
    const Fd file(openat(directory, temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666),
                  "cannot create a file");
    try {
        write_text(file, text);
        if (renameat(directory, temporary.c_str(), directory, name.c_str()) < 0) throw WriteFailed(name);
    } catch (...) {
        unlinkat(directory, temporary.c_str(), 0);
        throw;
    }
}

}  // namespace

machina::ToolResult file_write(const support::Input& input, machina::DSState&) {
    const std::string_view path = input.text("path");
    const std::string_view text = input.text("text");
    const std::vector<std::string> parts = parts_of(path);
    replace_file(open_parent(parts), parts.back(), text);
    return support::done("{\"path\":" + support::quoted(path) + ",\"bytes\":" + std::to_string(text.size()) + "}");
}

}  // namespace demo
