// --serve: a reply for every line, in order, for as long as lines come.
//
// A broker that sees its toolhost die takes it that only the first call without a reply can have run. That stays true
// because a reply is held back only while every call in the batch, and the next one, is pure: running such a call
// again changes nothing. Anything else finds the wire clear before it runs and has its reply written at once.
#include <new>

#include "clock.h"
#include "limits.h"
#include "line_reader.h"
#include "modes.h"
#include "reply.h"
#include "request.h"
#include "session.h"

namespace toolhost {
namespace {

class Server {
public:
    Server(const Protocol& protocol, const ToolTable& tools, HeldReplies& replies)
        : tools_(tools), replies_(replies), lines_(protocol.in, kMaxRequestBytes + kSplicedBytes) {}

    // Until an empty line, the end of input, or a reader who is gone.
    void run() {
        now_ns_ = now_ns();
        while (step()) continue;
        replies_.flush();
    }

private:
    bool step();
    bool answer(Line line);
    bool make_way_for(const Tool& tool);
    bool send(Tool* tool, bool hold);

    const ToolTable& tools_;
    HeldReplies& replies_;
    LineReader lines_;
    RequestReader requests_;
    Session session_;
    Text reply_;
    std::int64_t now_ns_ = 0;         // when the last reply was done, or the last bytes came in
    std::int64_t held_since_ns_ = 0;  // when the oldest held reply was done
};

bool Server::step() {
    Line line;
    switch (lines_.next(line)) {
        case LineReader::Next::Line:
            return line.size > 0 && answer(line);
        case LineReader::Next::TooLong:
            reply_.clear();
            append_error(reply_, "request line over " + std::to_string(kMaxRequestBytes) + " bytes");
            reply_.append("\n");
            return send(nullptr, true);
        case LineReader::Next::NeedMore:
            if (!replies_.flush()) return false;
            lines_.fill();
            now_ns_ = now_ns();
            return true;
        case LineReader::Next::End:
            break;
    }
    return false;
}

bool Server::answer(Line line) {
    Tool* tool = nullptr;
    bool hold = true;
    reply_.clear();
    try {
        Request request;
        if (const Refusal refusal = requests_.read(line, request)) {
            append_error(reply_, refusal.error, refusal.detail);
        } else if (request.aid.empty()) {
            append_error(reply_, "missing aid");
        } else {
            session_.apply(request.ds_state);
            if (session_.command(request, tools_, reply_)) {
                hold = false;
            } else if ((tool = tools_.find(request.aid)) != nullptr) {
                hold = tool->pure;
                if (!make_way_for(*tool)) return false;
                session_.call(*tool, request, reply_);
            } else {
                append_error(reply_, std::string("tool not found: ").append(request.aid));
            }
        }
        reply_.append("\n");
    } catch (const std::bad_alloc&) {
        reply_.release();
        append_error(reply_, "out of memory");
        reply_.append("\n");
    }
    return send(tool, hold);
}

// Writes what is held, unless this call is pure and due to be done before a held reply has waited too long.
bool Server::make_way_for(const Tool& tool) {
    if (replies_.empty()) return true;
    if (tool.pure && tool.usual_ns <= kQuickToolNs && now_ns_ - held_since_ns_ <= kMaxHeldNs) return true;
    return replies_.flush();
}

bool Server::send(Tool* tool, bool hold) {
    const std::int64_t done_ns = now_ns();
    if (tool != nullptr) tool->took(done_ns - now_ns_);
    now_ns_ = done_ns;
    if (replies_.empty()) held_since_ns_ = done_ns;
    return replies_.add(reply_.view()) && (hold || replies_.flush());
}

}  // namespace

int serve(const Protocol& protocol, const ToolTable& tools, HeldReplies& replies) {
    Server(protocol, tools, replies).run();
    return kExitOk;
}

}  // namespace toolhost
