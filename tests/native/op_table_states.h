// The rows of the op table for ops that keep a state.
#pragma once
#include <functional>
#include <memory>

#include "program/program.h"

using Check = std::function<void(const char* what, int64_t size, double got, double want, double magnitude)>;

void test_states(const hc::Kernels&, std::shared_ptr<hc::Pool>, const Check&);
