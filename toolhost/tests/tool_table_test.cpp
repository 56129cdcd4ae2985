// What follows from a tool's description: its tier, its purity, and whether its name is one.
#include "check.h"
#include "tool_table.h"

namespace {

using machina::ToolDesc;
using toolhost::is_aid;
using toolhost::tier_of;

machina::ToolResult nothing(const std::string&, machina::DSState&) { return {}; }

int tier(const std::string& aid, const std::vector<std::string>& effects) {
    return tier_of({aid, "", true, {}, effects, {}});
}

std::string refusal(toolhost::ToolTable& table, const ToolDesc& desc, machina::ToolFnPtr fn) {
    try {
        table.register_tool(desc, fn);
    } catch (const std::exception& e) {
        return e.what();
    }
    return "";
}

}  // namespace

TEST("a tool's tier is the first rule that matches") {
    CHECK(tier("AID.GENESIS.LOAD.v1", {"none"}) == 3);
    CHECK(tier("AID.SHELL.EXEC.v1", {"none"}) == 2);
    CHECK(tier("AID.NET.HTTP_GET.v1", {"none"}) == 2);
    CHECK(tier("AID.X.v1", {"none", "network_out"}) == 2);
    CHECK(tier("AID.X.v1", {"process_spawn"}) == 2);
    CHECK(tier("AID.X.v1", {"file_write", "exec"}) == 2);
    for (const char* effect : {"file_write", "log_append", "row_delete", "create_dir"}) {
        CHECK(tier("AID.X.v1", {effect}) == 1);
    }
    for (const char* aid : {"AID.FILE.WRITE.v1", "AID.MEMORY.APPEND.v1", "AID.VECDB.UPSERT.v1"}) {
        CHECK(tier(aid, {"none"}) == 1);
    }
    CHECK(tier("AID.DEMO.ECHO.v1", {"none"}) == 0);
    CHECK(tier("AID.DEMO.ECHO.v1", {}) == 0);
}

TEST("an AID has AID, parts in upper case, and a version") {
    for (const char* good : {"AID.A.v1", "AID.DEMO.WORD_COUNT.v12", "AID.X9_.Y.v0"}) CHECK(is_aid(good));
    for (const char* bad : {"", "AID", "AID.v1", "AID..v1", "AID.a.v1", "AID.9A.v1", "AID.A.v", "AID.A.1", "AID.A.v1 ",
                            "AID.A.v1.", "X.A.v1"}) CHECK(!is_aid(bad));
}

TEST("only a deterministic tool with side effects exactly none is pure") {
    toolhost::ToolTable table;
    table.register_tool({"AID.A.v1", "", true, {}, {"none"}, {}}, nothing);
    table.register_tool({"AID.B.v1", "", false, {}, {"none"}, {}}, nothing);
    table.register_tool({"AID.C.v1", "", true, {}, {}, {}}, nothing);
    table.register_tool({"AID.D.v1", "", true, {}, {"none", "none"}, {}}, nothing);
    CHECK(table.find("AID.A.v1")->pure);
    for (const char* aid : {"AID.B.v1", "AID.C.v1", "AID.D.v1"}) CHECK(!table.find(aid)->pure);
    CHECK(table.find("AID.E.v1") == nullptr);
}

TEST("a tool without a function, without an AID, or with one that is taken is refused by name") {
    toolhost::ToolTable table;
    CHECK(refusal(table, {"AID.A.v1", "", true, {}, {}, {}}, nothing) == "");
    CHECK(refusal(table, {"AID.A.v1", "", true, {}, {}, {}}, nothing) == "tool registered twice: AID.A.v1");
    CHECK(refusal(table, {"AID.B.v1", "", true, {}, {}, {}}, nullptr) == "tool without a function: AID.B.v1");
    CHECK(refusal(table, {"", "nameless", true, {}, {}, {}}, nothing) == "a tool without an AID: nameless");
    CHECK(refusal(table, {"_lease.gc", "", true, {}, {}, {}}, nothing) != "");
}
