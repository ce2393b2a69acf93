// Counts what a native test found: each failure is a line, and their number decides how the program ends.
#pragma once
#include <cstdio>
#include <string>

inline int failures = 0;

inline void expect(bool holds, const std::string& what) {
    if (holds) return;
    std::printf("%s\n", what.c_str());
    ++failures;
}
