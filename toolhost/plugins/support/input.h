// Input: a tool's input_json, read so that a wrong input ends in a sentence that says what was expected.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <yyjson.h>

#include "machina/plugin_api.h"

namespace support {

struct BadInput : std::runtime_error {
    using std::runtime_error::runtime_error;
};

class Input {
public:
    explicit Input(const std::string& json);
    ~Input() { yyjson_doc_free(doc_); }
    Input(const Input&) = delete;
    Input& operator=(const Input&) = delete;

    // Each throws BadInput if the member is of another kind, or absent where no default is given.
    std::string_view text(const char* name) const;
    std::int64_t number(const char* name, std::int64_t low, std::int64_t high,
                        std::optional<std::int64_t> otherwise = std::nullopt) const;
    bool flag(const char* name, bool otherwise) const;
    std::string json(const char* name) const;  // any value, as JSON text

private:
    yyjson_val* get(const char* name) const { return yyjson_obj_get(yyjson_doc_get_root(doc_), name); }

    std::unique_ptr<char, void (*)(void*)> text_;
    yyjson_doc* doc_;
};

// A JSON string, quotes included.
std::string quoted(std::string_view text);

bool is_json(std::string_view text);

inline machina::ToolResult done(std::string output_json) {
    return {machina::StepStatus::OK, std::move(output_json), ""};
}

inline machina::ToolResult failed(std::string error) {
    return {machina::StepStatus::TOOL_ERROR, "{}", std::move(error)};
}

// Makes a tool of a function that takes an Input: no exception of ours crosses into the host, whichever that is.
template <machina::ToolResult (*function)(const Input&, machina::DSState&)>
machina::ToolResult tool(const std::string& input_json, machina::DSState& state) {
    try {
        return function(Input(input_json), state);
    } catch (const std::exception& e) {
        return failed(e.what());
    }
}

}  // namespace support
