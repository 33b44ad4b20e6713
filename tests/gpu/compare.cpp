#include "gpu/compare.hpp"

#include <cstring>
#include <stdexcept>

#include "gpu/memory.hpp"

namespace wherry::test {

namespace {

std::size_t size(std::int64_t value) { return static_cast<std::size_t>(value); }

// Both planes are laid out for the same rows, and only what belongs to a row is promised.
void compare_scales(const At& at, const Received& here, const Received& there, RowRange range) {
  if (here.scales == nullptr) return;
  const WireFormat& wire = here.wire;
  if (there.scale_rows != here.scale_rows || !(there.wire == wire)) {
    differ(at, "the scales are laid out in another way");
  }
  const std::int64_t rows = here.scale_rows;
  const auto* cpu = static_cast<const std::byte*>(here.scales);
  const auto gpu =
      download(static_cast<const std::byte*>(there.scales), size(scale_plane_bytes(wire, rows)));
  const auto same = [&](std::int64_t row, std::int64_t offset, std::int64_t bytes) {
    if (std::memcmp(cpu + offset, gpu.data() + offset, size(bytes)) == 0) return;
    differ(at, fmt::format("the scale of row {} at byte {} of the plane is {:02x} on the CPU, "
                           "{:02x} on the GPU",
                           row, offset, std::to_integer<int>(cpu[offset]),
                           std::to_integer<int>(gpu[size(offset)])));
  };
  const bool packed = wire.scale_layout == ScaleLayout::packed_ue8m0;
  for (std::int64_t row = range.begin; row < range.end; ++row) {
    if (wire.scale_layout == ScaleLayout::row_major) {
      same(row, scale_offset(wire, rows, row, 0), wire.scale_bytes);
      continue;
    }
    for (std::int64_t block = 0; block < wire.num_blocks; block += packed ? 4 : 1) {
      const bool word = packed || wire.scale_type == ScaleType::f32;
      same(row, scale_offset(wire, rows, row, block), word ? 4 : 1);
    }
    if (wire.scale_type == ScaleType::e4m3_f32) {
      same(row, row_scale_offset(wire, rows, row), 4);
    }
  }
}

// Those of rows that something fills; of padding between segments too.
void compare_scalars(const At& at, const PlanData& plan, const Received& here,
                     const Received& there) {
  const auto gpu = download(there.device.row_scalars, size(plan.slot_begin.back()));
  for (std::size_t slot = 0; slot < plan.slot_counts.size(); ++slot) {
    for (std::int64_t i = 0; i < plan.slot_counts[slot]; ++i) {
      const std::size_t row = size(plan.slot_begin[slot] + i);
      if (same_bits(gpu[row], here.row_scalars[row])) continue;
      differ(at, fmt::format("scalar {} is {} on the CPU, {} on the GPU", row,
                             here.row_scalars[row], gpu[row]));
    }
  }
}

void compare_lists(const At& at, const PlanData& plan, const Received& here,
                   const Received& there) {
  const auto narrow_down = [](const std::vector<std::int64_t>& wide) {
    return std::vector<std::int32_t>(wide.begin(), wide.end());
  };
  compare(at, "device.slot_counts", narrow_down(plan.slot_counts),
          download(there.device.slot_counts, plan.slot_counts.size()));
  compare(at, "device.slot_begin", narrow_down(plan.slot_begin),
          download(there.device.slot_begin, plan.slot_begin.size()));
  compare(at, "device.num_rows", narrow_down({plan.rows_received, plan.token_rows_received}),
          download(there.device.num_rows, 2));
  if (at.test.scalars) compare_scalars(at, plan, here, there);
  if (at.test.config.layout != Layout::tokens) return;
  compare(at, "gather", {here.gather.begin(), here.gather.end()},
          download(there.device.gather, here.gather.size()));
  const auto choices = download(there.device.choices, here.choices.size());
  for (std::size_t i = 0; i < choices.size(); ++i) {
    if (same_bits(choices[i], here.choices[i])) continue;
    differ(at, fmt::format(
                   "choice {}: slot {}, weight {}, position {} on the CPU, {}, {}, {} on the "
                   "GPU",
                   i, here.choices[i].local_slot, here.choices[i].weight, here.choices[i].position,
                   choices[i].local_slot, choices[i].weight, choices[i].position));
  }
}

}  // namespace

void differ(const At& at, const std::string& what) {
  throw std::runtime_error(
      fmt::format("{}: rank {}, step {}: {}", at.test.name(), at.rank, at.step, what));
}

void compare_plans(const At& at, const PlanData& cpu, const PlanData& gpu) {
  const auto check = [&](const char* what, const auto& a, const auto& b) {
    compare(at, what, a, b);
  };
  check("dest", cpu.dest, gpu.dest);
  check("slot", cpu.slot, gpu.slot);
  check("row", cpu.row, gpu.row);
  check("token_row", cpu.token_row, gpu.token_row);
  check("weight", cpu.weight, gpu.weight);
  check("repeat", cpu.repeat, gpu.repeat);
  check("slot_counts", cpu.slot_counts, gpu.slot_counts);
  check("slot_begin", cpu.slot_begin, gpu.slot_begin);
  check("token_rows_from", cpu.token_rows_from, gpu.token_rows_from);
  check("token_rows_to", cpu.token_rows_to, gpu.token_rows_to);
  check("rows_to", cpu.rows_to, gpu.rows_to);
  check("dropped", cpu.dropped, gpu.dropped);
  const std::vector<std::int64_t> of_cpu{cpu.tokens, cpu.rows_received, cpu.token_rows_received};
  const std::vector<std::int64_t> of_gpu{gpu.tokens, gpu.rows_received, gpu.token_rows_received};
  check("totals", of_cpu, of_gpu);
}

void compare_rows(const At& at, const char* what, HostRows cpu, HostRows gpu,
                  std::int64_t row_bytes, RowRange range) {
  for (std::int64_t row = range.begin; row < range.end; ++row) {
    const std::byte* a = cpu.data + row * cpu.pitch;
    const std::byte* b = gpu.data + row * gpu.pitch;
    if (std::memcmp(a, b, size(row_bytes)) == 0) continue;
    std::int64_t byte = 0;
    while (a[byte] == b[byte]) ++byte;
    differ(at, fmt::format("{} row {} byte {} is {:02x} on the CPU, {:02x} on the GPU", what, row,
                           byte, std::to_integer<int>(a[byte]), std::to_integer<int>(b[byte])));
  }
}

void compare_received(const At& at, const PlanData& plan, const Received& here,
                      const Received& there) {
  const bool token_rows = at.test.config.layout == Layout::tokens;
  const std::int64_t bytes = here.rows.row_bytes();
  const std::int64_t rows = token_rows ? plan.token_rows_received : plan.slot_begin.back();
  const auto gpu_rows =
      download(static_cast<const std::byte*>(there.rows.data), size(rows * there.rows.pitch()));
  const auto compare_run = [&](std::int64_t begin, std::int64_t end) {
    compare_rows(at, "received", {here.rows.row(0), here.rows.pitch()},
                 {gpu_rows.data(), there.rows.pitch()}, bytes, {begin, end});
    compare_scales(at, here, there, {begin, end});
  };
  if (at.test.config.layout == Layout::slots) {
    for (std::size_t slot = 0; slot < plan.slot_counts.size(); ++slot) {
      compare_run(plan.slot_begin[slot], plan.slot_begin[slot] + plan.slot_counts[slot]);
    }
  } else {
    compare_run(0, rows);
  }
  compare_lists(at, plan, here, there);
}

}  // namespace wherry::test
