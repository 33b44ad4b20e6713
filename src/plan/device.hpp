// A plan whose contents are in the memory of a device.
#pragma once

#include "wherry/plan.hpp"

namespace wherry {

class DevicePlan {
 public:
  DevicePlan() = default;
  virtual ~DevicePlan() = default;
  DevicePlan(const DevicePlan&) = delete;
  DevicePlan& operator=(const DevicePlan&) = delete;

  // As Plan's.
  [[nodiscard]] virtual const PlanData& to_host() = 0;
  [[nodiscard]] virtual bool ready() = 0;
};

}  // namespace wherry
