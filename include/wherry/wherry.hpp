// Everything of Wherry, in the order of the data flow.
#pragma once

#include "wherry/error.hpp"
#include "wherry/exchange.hpp"
#include "wherry/experts.hpp"
#include "wherry/format.hpp"
#include "wherry/group.hpp"
#include "wherry/placement.hpp"
#include "wherry/plan.hpp"
#include "wherry/types.hpp"
