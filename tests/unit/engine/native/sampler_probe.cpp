// The sampler alone, to be compiled for other processors than the one at hand.
#include "sampler.h"
#include "team.h"

extern "C" int32_t fs_sample(void*, const FsSample* sample) {
  farsight::sample_rows(static_cast<farsight::Team*>(nullptr), *sample);
  return 0;
}
