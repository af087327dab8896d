#include "direct.h"

namespace lockstep {

const Algorithm direct_algorithm = {
    direct::weights_size,     direct::pack_weights, direct::forward_scratch, direct::forward,
    direct::backward_scratch, direct::sums_size,    direct::backward,        direct::finish,
};

}  // namespace lockstep
