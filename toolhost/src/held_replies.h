// HeldReplies: finished replies that wait for company, so that a batch of quick calls costs one write.
//
// When a call may be held is the caller's decision (serve.cpp). What is promised here is that no held reply is lost
// with a call that crashes behind it, or that ends the process with exit(): of all calls only that one stays without
// a reply. There is one such buffer in a process, because signal handlers have to find it.
#pragma once

#include <string_view>

namespace toolhost {

class HeldReplies {
public:
    // Installs the handlers: before the plugin is loaded, so that its own, if it has any, come first.
    explicit HeldReplies(int fd);

    bool empty() const;
    bool has_room_for(std::string_view line) const;

    // False once the reader is gone. `line` has its line end; without room it is written at once, behind what is held.
    bool add(std::string_view line);
    bool flush();
};

}  // namespace toolhost
