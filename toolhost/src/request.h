// Request: one line of JSON, read in place.
#pragma once

#include <string>
#include <string_view>
#include <yyjson.h>

#include "line_reader.h"

namespace toolhost {

// Why a line cannot be served. `error` is one of the protocol's fixed texts; `detail` says more where there is more.
struct Refusal {
    const char* error = nullptr;
    std::string detail;
};

// The members that the toolhost knows; every other one is passed over. A member of another type than the protocol's
// counts as absent. Views and values point into the line and into the reader, and die with the next read().
struct Request {
    std::string_view aid;
    std::string_view input_json = "{}";
    std::string_view idempotency_key;
    std::string_view lease_token;
    yyjson_val* ds_state = nullptr;

    // Of _lease.issue
    std::string_view tool_aid;
    yyjson_val* tier = nullptr;
    yyjson_val* ttl_ms = nullptr;
};

class RequestReader {
public:
    RequestReader();
    ~RequestReader() { release(); }
    RequestReader(const RequestReader&) = delete;
    RequestReader& operator=(const RequestReader&) = delete;

    // Overwrites the line: strings are unescaped where they stand. If it is false, refusal() says why.
    bool read(Line line, Request& request);
    const Refusal& refusal() const { return refusal_; }

private:
    bool refuse(const char* error, std::string detail = {});
    yyjson_doc* parse(Line line, yyjson_read_err& error);
    void release();

    yyjson_doc* doc_ = nullptr;
    yyjson_alc pool_allocator_;
    Refusal refusal_;
    alignas(16) char pool_[256 * 1024];  // enough for the JSON values of an ordinary line; longer ones use malloc
};

}  // namespace toolhost
