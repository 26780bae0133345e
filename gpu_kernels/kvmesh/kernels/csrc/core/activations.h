// Constants of the activations, for both compilers.
#pragma once

#include "platform.h"

KVM_BEGIN

// The tanh approximation of GELU is x * sigmoid(kGeluLinear * (x + kGeluCubic * x^3)), where kGeluLinear is
// 2 * sqrt(2 / pi) (https://arxiv.org/abs/1606.08415, section 2).
constexpr float kGeluLinear = 1.59576912160573071176f;
constexpr float kGeluCubic = 0.044715f;

KVM_END
