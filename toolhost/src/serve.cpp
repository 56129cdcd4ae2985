// --serve: a reply for every line, in order, for as long as lines come.
//
// A broker that sees its toolhost die takes it that only the first call without a reply can have run. That stays true
// because a reply is held back only while every call in the batch, and the next one, is pure: running such a call
// again changes nothing. Anything else finds the wire clear before it runs and has its reply written at once.
#include <new>

#include "environment.h"
#include "limits.h"
#include "line_reader.h"
#include "modes.h"
#include "pace.h"
#include "reply.h"
#include "request.h"
#include "session.h"
#include "spin.h"

namespace toolhost {
namespace {

class Server {
public:
    Server(const Protocol& protocol, ToolTable& tools, HeldReplies& replies)
        : in_(protocol.in),
          tools_(tools),
          replies_(replies),
          lines_(protocol.in, kMaxRequestBytes + kSplicedBytes),
          spin_(env_number("MACHINA_TOOLHOST_SPIN_US", 0) * 1000) {}

    // Until an empty line, the end of input, or a reader who is gone.
    void run() {
        while (step()) continue;
        flush();
    }

private:
    bool step();
    bool answer(Line line);
    bool call(Tool& tool, const Request& request);
    bool send(bool hold);
    bool flush();

    const int in_;
    ToolTable& tools_;
    HeldReplies& replies_;
    LineReader lines_;
    Spin spin_;
    RequestReader requests_;
    Session session_;
    Pace pace_;
    Text reply_;
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
            return send(true);
        case LineReader::Next::NeedMore:
            if (!flush()) return false;
            pace_.sleeps();
            spin_.wait(in_);
            lines_.fill();
            pace_.wakes();
            return true;
        case LineReader::Next::End:
            break;
    }
    return false;
}

bool Server::answer(Line line) {
    bool hold = true;
    reply_.clear();
    try {
        Request request;
        if (!requests_.read(line, request)) {
            append_error(reply_, requests_.refusal().error, requests_.refusal().detail);
        } else if (request.aid.empty()) {
            append_error(reply_, "missing aid");
        } else {
            session_.apply(request.ds_state);
            if (Tool* tool = tools_.find(request.aid)) {
                hold = tool->pure;
                if (!call(*tool, request)) return false;
            } else if (session_.command(request, tools_, reply_)) {
                hold = false;
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
    return send(hold);
}

bool Server::call(Tool& tool, const Request& request) {
    if (!pace_.may_wait_for(tool) && !flush()) return false;
    session_.call(tool, request, reply_);
    pace_.done();
    return true;
}

bool Server::send(bool hold) {
    if (!replies_.has_room_for(reply_.view()) && !flush()) return false;
    if (replies_.empty()) pace_.holding();
    return replies_.add(reply_.view()) && (hold || flush());
}

bool Server::flush() {
    if (replies_.empty()) return true;
    pace_.sleeps();  // a reader that is slow to make room makes no tool slow
    const bool read = replies_.flush();
    pace_.wakes();
    return read;
}

}  // namespace

int serve(const Protocol& protocol, ToolTable& tools, HeldReplies& replies) {
    Server(protocol, tools, replies).run();
    return kExitOk;
}

}  // namespace toolhost
