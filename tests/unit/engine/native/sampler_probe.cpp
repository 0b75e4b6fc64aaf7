// The sampler alone, to be compiled for other processors than the one at hand.
#include "sampler.cpp"

extern "C" int32_t fs_sample(void*, const FsSample* sample) {
  farsight::sample_rows(nullptr, *sample);
  return 0;
}
