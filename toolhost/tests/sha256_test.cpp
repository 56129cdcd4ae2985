// SHA-256 against the examples of FIPS 180-4 and the lengths around its padding.
#include "check.h"
#include "sha256.h"

namespace {

std::string hash(const std::string& text) {
    toolhost::Sha256 sha;
    sha.update(text.data(), text.size());
    return sha.hex_digest();
}

}  // namespace

TEST("SHA-256 of the standard's examples") {
    CHECK(hash("") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    CHECK(hash("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    CHECK(hash("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq") ==
          "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    CHECK(hash(std::string(1'000'000, 'a')) == "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST("SHA-256 does not depend on how the bytes are cut") {
    for (std::size_t size = 50; size < 140; ++size) {
        const std::string text(size, 'q');
        toolhost::Sha256 pieces;
        for (const char c : text) pieces.update(&c, 1);
        CHECK(pieces.hex_digest() == hash(text));
    }
}
