// Compiled once for each instruction set, as isa.cpp is, which takes minutes: a file of its own.
#include "ops/gated_delta.h"
#include "ops/short_conv.h"
#include "ops/ssm_scan.h"
#include "ops/token_shift.h"
#include "ops/wkv7.h"

namespace hc {

constexpr StateKernels HC_CONCAT(states_, HC_ISA) = {short_conv, gated_delta, ssm_scan, decay,
                                                     multiply,   token_shift, wkv7};

}  // namespace hc
