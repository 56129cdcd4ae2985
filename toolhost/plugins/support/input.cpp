// Input: typed access to a tool's input_json.
#include "input.h"

#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "large_pages.h"

namespace support {
namespace {

std::string take(char* written, std::size_t size) {
    const std::unique_ptr<char, decltype(&std::free)> owner(written, &std::free);
    if (written == nullptr) throw std::bad_alloc();
    return {written, size};
}

// What yyjson reads in place: a copy, with its padding.
char* copied(const std::string& json) {
    char* const copy = static_cast<char*>(std::malloc(json.size() + YYJSON_PADDING_SIZE));
    if (copy == nullptr) throw std::bad_alloc();
    toolhost::in_large_pages(copy, json.size());
    std::memcpy(copy, json.data(), json.size());
    std::memset(copy + json.size(), 0, YYJSON_PADDING_SIZE);
    return copy;
}

}  // namespace

Input::Input(const std::string& json)
    : text_(copied(json), &std::free),
      doc_(yyjson_read_opts(text_.get(), json.size(), YYJSON_READ_INSITU, nullptr, nullptr)) {
    if (yyjson_is_obj(yyjson_doc_get_root(doc_))) return;
    yyjson_doc_free(doc_);
    throw BadInput("input_json must be a JSON object");
}

std::string_view Input::text(const char* name) const {
    yyjson_val* value = get(name);
    if (!yyjson_is_str(value)) throw BadInput(std::string("\"") + name + "\" must be a string");
    return {yyjson_get_str(value), yyjson_get_len(value)};
}

std::int64_t Input::number(const char* name, std::int64_t low, std::int64_t high,
                           std::optional<std::int64_t> otherwise) const {
    yyjson_val* value = get(name);
    if (value == nullptr && otherwise) return *otherwise;
    const bool small = yyjson_is_sint(value) || (yyjson_is_uint(value) && yyjson_get_uint(value) <= INT64_MAX);
    if (small && yyjson_get_sint(value) >= low && yyjson_get_sint(value) <= high) return yyjson_get_sint(value);
    throw BadInput(std::string("\"") + name + "\" must be a whole number from " + std::to_string(low) + " to " +
                   std::to_string(high));
}

bool Input::flag(const char* name, bool otherwise) const {
    yyjson_val* value = get(name);
    if (value == nullptr) return otherwise;
    if (!yyjson_is_bool(value)) throw BadInput(std::string("\"") + name + "\" must be true or false");
    return yyjson_get_bool(value);
}

std::string Input::json(const char* name) const {
    yyjson_val* value = get(name);
    if (value == nullptr) throw BadInput(std::string("\"") + name + "\" is missing: any JSON value will do");
    std::size_t size = 0;
    char* written = yyjson_val_write(value, 0, &size);
    return take(written, size);
}

std::string quoted(std::string_view text) {
    const std::unique_ptr<yyjson_mut_doc, decltype(&yyjson_mut_doc_free)> doc(yyjson_mut_doc_new(nullptr),
                                                                             &yyjson_mut_doc_free);
    std::size_t size = 0;
    char* written = yyjson_mut_val_write(yyjson_mut_strn(doc.get(), text.data(), text.size()), 0, &size);
    return take(written, size);
}

bool is_json(std::string_view text) {
    yyjson_doc* doc = yyjson_read(text.data(), text.size(), 0);
    yyjson_doc_free(doc);
    return doc != nullptr;
}

}  // namespace support
