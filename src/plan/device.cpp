#include "plan/device.hpp"

namespace wherry {

const PlanData& Plan::to_host() const {
  return device_ != nullptr && filled_ ? device_->to_host() : data_;
}

bool Plan::ready() const { return filled_ && (device_ == nullptr || device_->ready()); }

}  // namespace wherry
