// CMake runs this to learn the instruction sets of the build's processor: prints names, best first.
#include <cstdio>

#include "isa/processor.h"

int main() {
    for (const hc::InstructionSet& isa : hc::kInstructionSets)
        if (isa.runs()) std::printf("%s;", isa.name);
    return 0;
}
