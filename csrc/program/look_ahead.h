// The router of a later layer, tried on what an earlier one reads: a guess at the experts that will be
// needed. Eliseev and Mazur, arXiv 2312.17238, section 3.2: the residual stream changes little from layer to
// layer.
#pragma once
#include <memory>

#include "disk/waves.h"
#include "program/program.h"

namespace hc {

// Rows of a step, at most, for which it is tried. With more of them most experts are likely.
constexpr int64_t kAheadRows = 4;

struct LookAhead {
    const float* x = nullptr;  // [T, D]: the residual stream
    bool normed = false;
    NormArgs norm{};  // before the router
    Rows weights;
    const float* bias = nullptr;
    Router router{};
    ExpertGroups groups;
    std::shared_ptr<Waves> waves;  // of that layer, which are told
};

}  // namespace hc
