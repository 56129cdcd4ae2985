// Request: parses a line with yyjson, in place, and picks the members that we know.
#include "request.h"

#include <cstring>

#include "limits.h"

namespace toolhost {
namespace {

// Any number that JSON allows may stand in a member that we pass over, so one that is too large is no error.
constexpr yyjson_read_flag kFlags = YYJSON_READ_INSITU | YYJSON_READ_BIGNUM_AS_RAW;

// yyjson reads without recursion; this recursion is as deep as the limit, and no deeper.
bool deeper_than(yyjson_val* value, unsigned levels) {
    const bool object = yyjson_is_obj(value);
    if (!object && !yyjson_is_arr(value)) return false;
    if (levels == 0) return true;
    yyjson_val *key, *child;
    std::size_t i, n;
    if (object) {
        yyjson_obj_foreach(value, i, n, key, child) if (deeper_than(child, levels - 1)) return true;
    } else {
        yyjson_arr_foreach(value, i, n, child) if (deeper_than(child, levels - 1)) return true;
    }
    return false;
}

std::string_view text_of(yyjson_val* value) { return {yyjson_get_str(value), yyjson_get_len(value)}; }

// Says which members were seen, so that none is seen twice.
class MemberPicker {
public:
    explicit MemberPicker(Request& request) : request_(request) {}

    // False if this is a known member's second occurrence: two readers of the line could disagree about which counts.
    bool pick(std::string_view name, yyjson_val* value) {
        switch (name.size()) {
            case 3: return name == "aid" ? text(0, value, request_.aid) : true;
            case 4: return name == "tier" ? any(1, value, request_.tier) : true;
            case 6: return name == "ttl_ms" ? any(2, value, request_.ttl_ms) : true;
            case 8:
                if (name == "ds_state") return any(3, value, request_.ds_state);
                return name == "tool_aid" ? text(4, value, request_.tool_aid) : true;
            case 10: return name == "input_json" ? text(5, value, request_.input_json) : true;
            case 12: return name == "_lease_token" ? text(6, value, request_.lease_token) : true;
            case 15: return name == "idempotency_key" ? text(7, value, request_.idempotency_key) : true;
            default: return true;
        }
    }

private:
    bool first(unsigned member) {
        const unsigned bit = 1u << member;
        const bool is_first = (seen_ & bit) == 0;
        seen_ |= bit;
        return is_first;
    }
    bool text(unsigned member, yyjson_val* value, std::string_view& to) {
        if (yyjson_is_str(value)) to = text_of(value);
        return first(member);
    }
    bool any(unsigned member, yyjson_val* value, yyjson_val*& to) {
        to = value;
        return first(member);
    }

    Request& request_;
    unsigned seen_ = 0;
};

}  // namespace

RequestReader::RequestReader() { yyjson_alc_pool_init(&pool_allocator_, pool_, sizeof pool_); }

yyjson_doc* RequestReader::parse(Line line, yyjson_read_err& error) {
    // yyjson wants zeros behind its input, and there the next line may begin.
    char* const behind = line.data + line.size;
    char kept[YYJSON_PADDING_SIZE];
    std::memcpy(kept, behind, sizeof kept);
    std::memset(behind, 0, sizeof kept);

    const bool fits = yyjson_read_max_memory_usage(line.size, kFlags) < sizeof pool_;
    yyjson_doc* doc = yyjson_read_opts(line.data, line.size, kFlags, fits ? &pool_allocator_ : nullptr, &error);
    std::memcpy(behind, kept, sizeof kept);
    return doc;
}

void RequestReader::release() {
    yyjson_doc_free(doc_);
    doc_ = nullptr;
}

bool RequestReader::refuse(const char* error, std::string detail) {
    refusal_ = {error, std::move(detail)};
    return false;
}

bool RequestReader::read(Line line, Request& request) {
    release();
    yyjson_read_err error;
    doc_ = parse(line, error);
    if (doc_ == nullptr) {
        return refuse(error.code == YYJSON_READ_ERROR_MEMORY_ALLOCATION ? "out of memory" : "invalid JSON");
    }
    yyjson_val* root = yyjson_doc_get_root(doc_);
    // A container takes two bytes at least: a shorter line cannot nest that deep.
    if (line.size > 2 * kMaxNesting && deeper_than(root, kMaxNesting)) {
        return refuse("invalid JSON", "nested deeper than " + std::to_string(kMaxNesting));
    }
    if (!yyjson_is_obj(root)) return refuse("invalid JSON");

    MemberPicker members(request);
    yyjson_val *key, *value;
    std::size_t i, n;
    yyjson_obj_foreach(root, i, n, key, value) {
        if (!members.pick(text_of(key), value)) {
            return refuse("invalid JSON", "member given twice: " + std::string(text_of(key)));
        }
    }
    return true;
}

}  // namespace toolhost
