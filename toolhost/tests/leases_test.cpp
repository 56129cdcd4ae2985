// LeaseTable: every way in which a token opens a tool, and every way in which it does not.
#include "check.h"
#include "leases.h"

#include <set>

namespace {

using toolhost::LeaseTable;

toolhost::Tool tool_of(const char* aid, int tier) {
    toolhost::Tool tool;
    tool.desc.aid = aid;
    tool.tier = tier;
    return tool;
}

const toolhost::Tool kWrite = tool_of("AID.FILE.WRITE.v1", 1);
const toolhost::Tool kShell = tool_of("AID.SHELL.v1", 2);

}  // namespace

TEST("a lease opens its tool once") {
    LeaseTable leases;
    const std::string token = *leases.issue("AID.FILE.WRITE.v1", 1, 5000, 0);
    CHECK(leases.spend(token, kWrite, 1) == "");
    CHECK(leases.spend(token, kWrite, 2) == "lease already consumed");
}

TEST("a token is lease_ and 32 hex digits, and no two are the same") {
    LeaseTable leases;
    std::set<std::string> tokens;
    for (int i = 0; i < 1000; ++i) {
        const std::string token = *leases.issue("*", 1, 5000, 0);
        CHECK(token.size() == 38 && token.find_first_not_of("0123456789abcdef", 6) == token.npos);
        tokens.insert(token);
    }
    CHECK(tokens.size() == 1000);
}

TEST("a rejected use does not spend the lease") {
    LeaseTable leases;
    const std::string token = *leases.issue("AID.FILE.WRITE.v1", 1, 5000, 0);
    CHECK(leases.spend(token, kShell, 1) == "lease tool mismatch: expected=AID.FILE.WRITE.v1 got=AID.SHELL.v1");
    CHECK(leases.spend(token, kWrite, 1) == "");
}

TEST("a lease of a lower tier does not open the tool") {
    LeaseTable leases;
    CHECK(leases.spend(*leases.issue("AID.SHELL.v1", 1, 5000, 0), kShell, 0) == "lease tier too low");
    CHECK(leases.spend(*leases.issue("*", 1, 5000, 0), kShell, 0) == "lease tier too low");
    CHECK(leases.spend(*leases.issue("*", 2, 5000, 0), kWrite, 0) == "");
}

TEST("what was never issued is not found") {
    LeaseTable leases;
    const std::string token = *leases.issue("*", 3, 5000, 0);
    for (const std::string& wrong : {std::string(), token.substr(1), token + "0", token.substr(0, 37) + "x",
                                     "lease_" + std::string(32, '0')}) {
        CHECK(leases.spend(wrong, kWrite, 0) == "lease not found");
    }
}

TEST("a lease lives from one second to five minutes, whatever was asked for") {
    LeaseTable leases;
    const std::string brief = *leases.issue("*", 3, -7, 0);
    const std::string endless = *leases.issue("*", 3, 1'000'000'000, 0);
    CHECK(leases.spend(brief, kWrite, 1000) == "lease expired");
    CHECK(leases.spend(endless, kWrite, 300'000) == "lease expired");
    CHECK(leases.spend(*leases.issue("*", 3, 0, 0), kWrite, 999) == "");
}

TEST("the counts tell issued, active, consumed and rejected apart") {
    LeaseTable leases;
    const std::string token = *leases.issue("*", 1, 5000, 0);
    leases.issue("*", 1, 1000, 0);
    leases.spend(token, kWrite, 0);
    leases.spend(token, kWrite, 0);
    const auto early = leases.collect(0), later = leases.collect(1000);
    CHECK(early.active == 1 && early.issued == 2 && early.consumed == 1 && early.rejected == 1);
    CHECK(later.active == 0 && later.issued == 2);
}

TEST("a full table makes room of leases that are of no use, and refuses otherwise") {
    LeaseTable leases(2);
    const std::string used = *leases.issue("*", 1, 5000, 0);
    const std::string open = *leases.issue("*", 1, 5000, 0);
    CHECK(!leases.issue("*", 1, 5000, 0));
    leases.spend(used, kWrite, 0);
    CHECK(leases.issue("*", 1, 5000, 0));
    CHECK(leases.spend(open, kWrite, 0) == "");
}
