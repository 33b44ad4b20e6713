// Stage 4, experts: the gated MLP of each local expert over the rows that dispatch brought. Local to
// one rank: nothing here talks to a peer. On the CPU, or on a GPU by cuBLAS.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "wherry/exchange.hpp"
#include "wherry/types.hpp"

namespace wherry {

// The three weight matrices of an expert, in the order in which they are asked for.
enum class Matrix : std::uint8_t {
  gate,  // [expert_hidden, hidden]
  up,    // [expert_hidden, hidden]
  down,  // [hidden, expert_hidden]
};
[[nodiscard]] std::string_view name(Matrix matrix) noexcept;

// Writes one matrix of a logical expert into `weights`: row-major, tightly packed, of the shape
// above and the dtype of the configuration. Called once per expert and matrix, from the constructor.
using WeightSource = std::function<void(int expert, Matrix matrix, TensorView weights)>;

// Use designated initialisers.
struct ExpertsConfig {
  std::int64_t hidden = 0;         // elements of a row, >= 1
  std::int64_t expert_hidden = 0;  // elements between the two halves of the MLP, >= 1
  DType dtype = DType::bf16;       // of rows, weights and results: bf16 or f32
  // Threads of this rank, this one included. Ranks on one machine share its cores: with 4 rank
  // processes on 2 cores, 1 each.
  int num_threads = 1;  // CPU only
  // CPU: "onednn", "plain"; CUDA: "cublas". Empty: the best for this build and machine.
  std::string implementation = {};
};

class Mlp;

// y = W_down (silu(W_gate x) * (W_up x)) for every row x of every local expert, silu(g) =
// g / (1 + exp(-g)).
//
// Numerics. bf16: products and sums in fp32, silu(gate)*up rounded to bf16, y rounded to bf16; f32:
// everything in fp32. `plain` adds in index order without fusing, so its bits are the same on every
// machine. On the CPU the result of a row does not depend on the rows beside it; cuBLAS does not promise
// that, and rounds gate and up to the dtype as well.
//
// The constructor is the first thing in a process that touches oneDNN (and the OpenMP beneath it), or
// CUDA: fork before it. Movable; one thread uses an object at a time.
//
// On a GPU rows and results are device memory, calls are ordered in the stream of set_stream() and return
// when launched. Counts are the host's: Received's own are empty there, so take those of Plan::to_host().
class GatedMlp {
 public:
  // Local, blocking. experts[s] is the logical expert of local slot s. Asks for the weights one
  // expert at a time and keeps them only in the form the multiplication reads, so the peak is
  // weight_bytes() and one plain expert. Throws bad_argument, unsupported (a dtype, or an
  // implementation this build or machine does not have, and why), out_of_memory, and whatever
  // `fill` throws.
  GatedMlp(const ExpertsConfig& config, std::span<const int> experts, const WeightSource& fill);
  // The same on a device; `fill` writes to host memory there too. On CUDA also throws unsupported where
  // cuBLAS cannot be loaded, and says what was tried.
  GatedMlp(Device device, const ExpertsConfig& config, std::span<const int> experts,
           const WeightSource& fill);
  GatedMlp(GatedMlp&&) noexcept;
  GatedMlp& operator=(GatedMlp&&) noexcept;
  ~GatedMlp();

  [[nodiscard]] const ExpertsConfig& config() const noexcept;
  [[nodiscard]] Device device() const noexcept;
  // The cudaStream_t of the following calls; null, as at first, is the default stream. No effect on the CPU.
  void set_stream(void* stream);
  [[nodiscard]] std::int64_t num_slots() const noexcept;
  [[nodiscard]] std::uint64_t weight_bytes() const noexcept;  // of the packed weights, exactly

  struct Implementation {
    std::string name;    // "onednn", "plain" or "cublas"
    std::string reason;  // a sentence for people: version and instruction set, or why not oneDNN
  };
  [[nodiscard]] const Implementation& implementation() const noexcept;

  // Layout `grouped`: slot s has the rows [slot_begin[s], slot_begin[s] + slot_counts[s]) of rows
  // [n, hidden], its results go to the same rows of out [n, hidden]. All other rows of `out`
  // (padding) stay as they are, and those of `rows` are not read. slot_counts [num_slots];
  // slot_begin [num_slots] or one more, as in Received. rows and out must not overlap. Local,
  // blocking; a slot without rows costs nothing. Throws bad_argument.
  void forward(ConstTensorView rows, std::span<const std::int64_t> slot_begin,
               std::span<const std::int64_t> slot_counts, TensorView out);

  // Layout `tokens`: for each received row, out = sum over its choices on this rank, in k order, of
  // weight * y, by fp32 fused multiply-add from 0, rounded once: exactly what by_rank makes of
  // `grouped`. Reads rows, choices, gather, slot_begin and slot_counts; out [token rows, hidden].
  // Keeps a buffer of one result per grouped position. On CUDA the lists are those of received.device,
  // and slot_begin and slot_counts those that the caller put there. Local, blocking. Throws bad_argument.
  void forward_gathered(const Received& received, TensorView out);

  // Layout `slots`: rows and out [num_slots * rows_per_slot, hidden]; slot s has the first
  // slot_counts[s] of its rows_per_slot rows, the others stay as they are. On CUDA slot_counts may be
  // empty: then all rows are multiplied, whatever they hold, which is legal in a captured graph once a
  // call of that size has been made. Local, blocking. Throws bad_argument.
  void forward_slots(ConstTensorView rows, std::span<const std::int64_t> slot_counts,
                     TensorView out);

 private:
  std::unique_ptr<Mlp> mlp_;
};

}  // namespace wherry
