// What rows may hold and how they lie: every type, every bit pattern, dirty memory, big offsets.
#include <sys/mman.h>

#include "conformance/matrix.hpp"
#include "exchange/config.hpp"
#include "group/state.hpp"

namespace wherry::test {
namespace {

std::vector<Setting> by_token(const std::vector<int>& ranks) {
  std::vector<Setting> all;
  for (const Setting& s : settings(ranks)) {
    if (s.form.reduction == Reduction::by_token) all.push_back(s);
  }
  return all;
}

TEST(Dtypes, F32F16Bf16AndF64AreSummedByTheirRule) {
  in_every_setting(settings({1, 3}), [](const Setting& s) {
    const Batch batch = make_batch(17, s.ranks, 9, 3, 37, 121, 0.1);
    s.run([&](Group& group) {
      run_and_verify<Bf16>(group, batch, s.config(batch));
      run_and_verify<_Float16>(group, batch, s.config(batch));
      run_and_verify<float>(group, batch, s.config(batch));
      run_and_verify<double>(group, batch, s.config(batch));
    });
  });
}

TEST(Dtypes, OpaqueBytesArriveAsTheyWereAndCannotBeSummed) {
  in_every_setting(settings({1, 3}), [](const Setting& s) {
    for (const std::int64_t bytes : {1, 3, 16, 61, 4096}) {
      Batch batch = make_batch(12, s.ranks, 6, 2, bytes, 122);
      ExchangeConfig config = s.config(batch);
      config.dtype = DType::raw;
      s.run([&](Group& group) {
        Exchange exchange(group, config);
        Plan plan = exchange.make_plan();
        exchange.plan(batch.routing_of(group.rank()), plan);
        const std::int64_t first = batch.token_begin[static_cast<std::size_t>(group.rank())];
        const auto byte_of = [](std::int64_t token, std::int64_t at) {
          return static_cast<std::byte>(token * 37 + at * 11);
        };
        std::vector<std::byte> x;
        for (std::int64_t t = first; t < first + plan.tokens(); ++t) {
          for (std::int64_t at = 0; at < bytes; ++at) x.push_back(byte_of(t, at));
        }
        const Received r = exchange.dispatch(plan, {x.data(), DType::raw, plan.tokens(), bytes});
        // Rows come by slot, then source rank, then token: the expected order, made by hand.
        const Placement& placement = exchange.placement();
        std::vector<std::int64_t> order;
        const int begin = placement.slot_begin()[static_cast<std::size_t>(group.rank())];
        if (s.form.layout == Layout::tokens) {
          for (std::int64_t t = 0; t < batch.tokens(); ++t) {
            bool here = false;
            for (int k = 0; k < 2; ++k) {
              const auto id =
                  static_cast<std::size_t>(batch.ids[static_cast<std::size_t>(t * 2 + k)]);
              here = here || placement.slot_to_rank()[id] == group.rank();
            }
            if (here) order.push_back(t);
          }
        }
        for (std::size_t slot = 0; s.form.layout != Layout::tokens && slot < r.slot_counts.size();
             ++slot) {
          for (std::int64_t t = 0; t < batch.tokens(); ++t) {
            for (int k = 0; k < 2; ++k) {
              if (batch.ids[static_cast<std::size_t>(t * 2 + k)] ==
                  begin + static_cast<int>(slot)) {
                order.push_back(t);
              }
            }
          }
        }
        std::size_t next = 0;
        const auto check = [&](std::int64_t row) {
          expect(next < order.size(), "too many rows");
          for (std::int64_t at = 0; at < bytes; ++at) {
            expect(r.rows.row<std::byte>(row)[at] == byte_of(order[next], at),
                   fmt::format("row {} is not token {}", row, order[next]));
          }
          ++next;
        };
        if (s.form.layout == Layout::tokens) {
          for (std::int64_t row = 0; row < r.rows.rows; ++row) check(row);
        } else {
          for (std::size_t slot = 0; slot < r.slot_counts.size(); ++slot) {
            for (std::int64_t i = 0; i < r.slot_counts[slot]; ++i) check(r.slot_begin[slot] + i);
          }
        }
        expect(next == order.size(), fmt::format("{} rows of {}", next, order.size()));
        TensorView out;
        out.data = x.data();
        out.dtype = DType::raw;
        out.rows = plan.tokens();
        out.cols = bytes;
        expect_error(ErrorCode::unsupported, "opaque bytes and cannot be summed",
                     [&] { exchange.combine(plan, r.rows, out); });
      });
    }
  });
}

constexpr std::uint16_t kTraps[] = {0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x7F7F, 0xFF7F,
                                    0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0x3F80};

// Rows of zeros, NaN, infinities, subnormals and -0 travel bit for bit; in the sum a NaN stays in its
// column, zeros stay zero, and what fits is what it was.
TEST(NumericTraps, EveryBitPatternTravelsAndSpreadsToNoOtherColumn) {
  in_every_setting(settings({1, 3}), [](const Setting& s) {
    constexpr std::int64_t kHidden = std::size(kTraps);
    Batch batch = make_batch(9, s.ranks, 6, 1, kHidden, 123);
    batch.weights.assign(batch.weights.size(), 1.0F);
    ExchangeConfig config = s.config(batch);
    s.run([&](Group& group) {
      Exchange exchange(group, config);
      Plan plan = exchange.make_plan();
      exchange.plan(batch.routing_of(group.rank()), plan);
      std::vector<Bf16> x;
      for (std::int64_t t = 0; t < plan.tokens(); ++t) {
        for (std::int64_t h = 0; h < kHidden; ++h) {
          x.push_back({kTraps[static_cast<std::size_t>((h + t) % kHidden)]});
        }
      }
      std::vector<Bf16> out(x.size());
      const Received r = exchange.dispatch(plan, view(x, kHidden));
      const TensorView y = exchange.combine_input(plan);
      const auto copy = [&](std::int64_t row) {
        const auto* const bits = r.rows.row<Bf16>(row);
        std::int64_t found = -1;  // the rotation that this row is
        for (std::int64_t shift = 0; shift < kHidden; ++shift) {
          bool same = true;
          for (std::int64_t h = 0; h < kHidden; ++h) {
            same = same && bits[h].bits == kTraps[static_cast<std::size_t>((h + shift) % kHidden)];
          }
          if (same) found = shift;
        }
        expect(found >= 0, "a row's bits have changed");
        std::memcpy(y.row(row), bits, static_cast<std::size_t>(r.rows.row_bytes()));
      };
      if (s.form.layout == Layout::tokens) {
        for (std::int64_t row = 0; row < r.rows.rows; ++row) copy(row);
      } else {
        for (std::size_t slot = 0; slot < r.slot_counts.size(); ++slot) {
          for (std::int64_t i = 0; i < r.slot_counts[slot]; ++i) copy(r.slot_begin[slot] + i);
        }
      }
      exchange.combine(plan, y, view(out, kHidden));
      for (std::size_t i = 0; i < x.size(); ++i) {
        const bool nan = std::isnan(widen(x[i]));
        // The one canonical NaN; -0 becomes the +0 that sums start with.
        const std::uint16_t want = nan ? 0x7FC0 : x[i].bits == 0x8000 ? 0 : x[i].bits;
        expect(out[i].bits == want,
               fmt::format("{:#06x} came home as {:#06x}", x[i].bits, out[i].bits));
      }
    });
  });
}

// Fills the part of every window that holds rows with NaN before the first step.
void poison(Group& group, const ExchangeConfig& config) {
  detail::GroupState& state = group.state();
  const auto layout =
      layout::make_window_layout(capacity_of(config, placement_of(config, group.size())).params);
  state.connect = [real = state.connect, layout](const Group& of, const WindowRequest& request) {
    std::unique_ptr<Fabric> fabric = real(of, request);
    std::memset(fabric->window(of.rank()) + layout.rows, 0xFF, layout.bytes - layout.rows);
    return fabric;
  };
}

TEST(UninitialisedPadding, AWorkspaceFullOfNanChangesNothing) {
  in_every_setting(settings(), [](const Setting& s) {
    const Batch batch = make_batch(21, s.ranks, 9, 3, 24, 124, 0.2);
    ExchangeConfig config = s.config(batch);
    config.depth = 2;
    if (s.form.layout == Layout::grouped) config.alignment = 8;
    s.run([&](Group& group) {
      poison(group, config);
      Exchange exchange(group, config);
      for (int step = 0; step < 3; ++step) {
        expect_dense<Bf16>(exchange, batch, run_layer<Bf16>(exchange, batch));
      }
      Plan plan = exchange.make_plan();
      exchange.plan(batch.routing_of(group.rank()), plan);
      std::vector<Bf16> x = tokens_of<Bf16>(batch, group.rank());
      const Received r = exchange.dispatch(plan, view(x, batch.hidden));
      if (s.form.layout != Layout::grouped) return;
      for (std::size_t slot = 0; slot < r.slot_counts.size(); ++slot) {
        for (std::int64_t row = r.slot_begin[slot] + r.slot_counts[slot];
             row < r.slot_begin[slot + 1]; ++row) {
          for (std::int64_t h = 0; h < batch.hidden; ++h) {
            expect(r.rows.row<Bf16>(row)[h].bits == 0, "padding is not zero");
          }
        }
      }
    });
  });
}

// Memory of which only what is touched exists.
class Sparse {
 public:
  explicit Sparse(std::size_t bytes)
      : bytes_(bytes),
        data_(mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {
    if (data_ == MAP_FAILED) throw std::bad_alloc();
  }
  ~Sparse() { munmap(data_, bytes_); }
  Sparse(const Sparse&) = delete;
  Sparse& operator=(const Sparse&) = delete;
  [[nodiscard]] TensorView view(std::int64_t rows, std::int64_t cols, std::int64_t pitch) const {
    TensorView v;
    v.data = data_;
    v.rows = rows;
    v.cols = cols;
    v.pitch_bytes = pitch;
    return v;
  }

 private:
  std::size_t bytes_;
  void* data_;
};

// Rows of the caller lie 2 GiB and more apart.
TEST(BigOffsets, RowsOfTheCallerLieBeyondFourGigabytes) {
  in_every_setting(by_token({2}), [](const Setting& s) {
    const Batch batch = make_batch(6, s.ranks, 4, 2, 16, 125);
    constexpr std::int64_t kPitch = (std::int64_t{1} << 31) + 64;
    s.run([&](Group& group) {
      Exchange exchange(group, s.config(batch));
      Plan plan = exchange.make_plan();
      exchange.plan(batch.routing_of(group.rank()), plan);
      const std::vector<Bf16> dense = tokens_of<Bf16>(batch, group.rank());
      const std::int64_t rows = std::max<std::int64_t>(plan.tokens(), 1);
      const Sparse x_memory(static_cast<std::size_t>(rows * kPitch));
      const Sparse out_memory(static_cast<std::size_t>(rows * kPitch));
      const TensorView x = x_memory.view(plan.tokens(), 16, kPitch);
      const TensorView out = out_memory.view(plan.tokens(), 16, kPitch);
      for (std::int64_t t = 0; t < x.rows; ++t)
        std::memcpy(x.row(t), &dense[static_cast<std::size_t>(t * 16)], 32);
      const Received r = exchange.dispatch(plan, x);
      const TensorView y = exchange.combine_input(plan);
      apply_experts<Bf16>(exchange, r, y);
      exchange.combine(plan, y, out);
      std::vector<Bf16> home(dense.size());
      for (std::int64_t t = 0; t < x.rows; ++t)
        std::memcpy(&home[static_cast<std::size_t>(t * 16)], out.row(t), 32);
      expect_dense<Bf16>(exchange, batch, home);
    });
  });
}

// Slots lie gigabytes apart in the window, of which only the rows that come are touched.
TEST(BigOffsets, SlotsOfTheWindowLieBeyondFourGigabytes) {
  in_every_setting(by_token({2}), [](const Setting& s) {
    if (s.form.layout != Layout::slots) return;
    const Batch batch = make_batch(6, s.ranks, 6, 3, 16384, 126);
    ExchangeConfig config = s.config(batch);
    config.max_tokens = 70'000;
    config.rows_per_slot = 70'000;  // 2.3 GB a slot
    s.run([&](Group& group) {
      Exchange exchange(group, config);
      expect(exchange.window_bytes() > std::uint64_t{10} << 30, "a small window");
      expect_dense<Bf16>(exchange, batch, run_layer<Bf16>(exchange, batch));
    });
  });
}

}  // namespace
}  // namespace wherry::test
