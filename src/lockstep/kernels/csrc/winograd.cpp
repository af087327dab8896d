#include "winograd.h"

namespace lockstep {

const Algorithm winograd_algorithm = {
    winograd::weights_size,     winograd::pack_weights, winograd::forward_scratch, winograd::forward,
    winograd::backward_scratch, winograd::sums_size,    winograd::backward,        winograd::finish,
};

}  // namespace lockstep
