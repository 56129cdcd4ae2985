// What the program says about itself.
#pragma once

namespace toolhost {

extern const char* const kUsage;    // one line
extern const char* const kHelp;     // --help
extern const char* const kVersion;  // --version

}  // namespace toolhost
