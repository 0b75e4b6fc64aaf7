// What the files that are compiled by themselves (library.py) take from each other. Attention's part is in attention.h.
#pragma once

#include <memory>

#include "interface.h"
#include "linear.h"
#include "team.h"

namespace farsight {

// A matrix with weights in float32 or bfloat16 (dense.cpp). Copies the weights [n, k].
std::unique_ptr<Linear> make_dense(bool bf16, const FsLinear& from);

// A matrix with weights in 8 or 4 bits (quantized_linear.cpp). Copies the weights.
std::unique_ptr<Linear> make_quantized(const FsLinear& from);

// Tokens and log probabilities of rows of logits (sampler.cpp), by the threads of a team if there is one and enough to do.
void sample_rows(Team* team, const FsSample& s);
void log_rows(Team* team, const FsLog& s);

}  // namespace farsight
