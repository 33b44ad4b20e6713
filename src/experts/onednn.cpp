// bf16 by oneDNN, used as a kernel for one panel and never as a thread pool: it always runs on one
// thread, so it starts no OpenMP threads, and the team of the rank splits the panels.
#include <dlfcn.h>

#include <new>
#include <oneapi/dnnl/dnnl.hpp>

#include "experts/panels.hpp"
#include "support/check.hpp"

namespace wherry::experts {
namespace {

using dnnl::memory;
using DataType = memory::data_type;
using Tag = memory::format_tag;

// Holds the calling thread's OpenMP at one thread, then gives it back what it had. Looked up at run
// time: oneDNN brings an OpenMP library (which one depends on the packager), we do not.
class OneThread {
 public:
  OneThread() {
    if (kSet == nullptr || kGet == nullptr) return;
    before_ = kGet();
    kSet(1);
  }
  ~OneThread() {
    if (before_ > 0) kSet(before_);
  }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  template <typename Function>
  static Function* find(const char* symbol) {
    return reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, symbol));
  }
  inline static void (*const kSet)(int) = find<void(int)>("omp_set_num_threads");
  inline static int (*const kGet)() = find<int()>("omp_get_max_threads");
  int before_ = 0;
};

// Made on first use, after any fork.
const dnnl::engine& engine() {
  static const dnnl::engine instance(dnnl::engine::kind::cpu, 0);
  return instance;
}

std::string version() {
  const dnnl::version_t* const v = dnnl::version();
  return fmt::format("oneDNN {}.{}.{}", v->major, v->minor, v->patch);
}

// oneDNN's own scratch is bound to the thread that made the primitive; this one is not.
void* scratch(std::size_t bytes) {
  struct Free {
    void operator()(void* pointer) const { ::operator delete(pointer, std::align_val_t{64}); }
  };
  thread_local std::unique_ptr<void, Free> buffer;
  thread_local std::size_t size = 0;
  if (size < bytes) {
    buffer.reset(::operator new(bytes, std::align_val_t{64}));
    size = bytes;
  }
  return buffer.get();
}

dnnl::matmul::primitive_desc describe(const PanelShape& shape) {
  const dnnl::matmul::desc desc(memory::desc({kPanelRows, shape.inner}, DataType::bf16, Tag::ab),
                                memory::desc({shape.inner, shape.cols}, DataType::bf16, Tag::any),
                                memory::desc({kPanelRows, shape.cols}, DataType::f32, Tag::ab));
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  return {desc, attributes, engine()};
}

class OnednnMatmul final : public PanelMatmul {
 public:
  OnednnMatmul(const PanelShape& shape, const dnnl::matmul::primitive_desc& description)
      : plain_({shape.inner, shape.cols}, DataType::bf16, Tag::ba),
        rows_(description.src_desc()),
        panel_(description.weights_desc()),
        result_(description.dst_desc()),
        scratch_(description.scratchpad_desc()),
        multiply_(description),
        pack_(dnnl::reorder::primitive_desc(engine(), plain_, engine(), panel_)),
        stream_(engine()) {}

  [[nodiscard]] std::size_t panel_bytes() const override {
    return (panel_.get_size() + 63) / 64 * 64;
  }

  void pack(const std::byte* weights, std::byte* panel) const override {
    const OneThread one_thread;
    memory from(plain_, engine(), const_cast<std::byte*>(weights));
    memory to(panel_, engine(), panel);
    pack_.execute(stream_, from, to);
  }

  void multiply(const std::byte* rows, std::int64_t /*num_rows*/, const std::byte* panel,
                float* result) const override {
    const OneThread one_thread;
    multiply_.execute(
        stream_, {{DNNL_ARG_SRC, memory(rows_, engine(), const_cast<std::byte*>(rows))},
                  {DNNL_ARG_WEIGHTS, memory(panel_, engine(), const_cast<std::byte*>(panel))},
                  {DNNL_ARG_DST, memory(result_, engine(), result)},
                  {DNNL_ARG_SCRATCHPAD, memory(scratch_, engine(), scratch(scratch_.get_size()))}});
  }

 private:
  memory::desc plain_, rows_, panel_, result_, scratch_;
  dnnl::matmul multiply_;
  mutable dnnl::reorder pack_;
  mutable dnnl::stream stream_;  // of a CPU engine: has no state, execution is immediate
};

}  // namespace

std::unique_ptr<PanelMatmul> make_onednn_matmul(const PanelShape& shape, std::string& reason) {
  const OneThread one_thread;
  try {
    const dnnl::matmul::primitive_desc description = describe(shape);
    const std::string kernel = description.impl_info_str();
    // Its reference kernels are slower than ours.
    if (kernel.starts_with("ref")) {
      reason = fmt::format("{} has only reference code for bf16 on this processor", version());
      return nullptr;
    }
    reason = fmt::format("{}, {}", version(), kernel.substr(kernel.find(':') + 1));
    return std::make_unique<OnednnMatmul>(shape, description);
  } catch (const dnnl::error& error) {
    WHERRY_CHECK(error.status != dnnl_out_of_memory, ErrorCode::out_of_memory,
                 (Error::Where{Stage::experts, -1, -1}), "{}: {}", version(), error.what());
    reason = fmt::format("{} has no code for bf16 on this processor ({})", version(), error.what());
    return nullptr;
  }
}

}  // namespace wherry::experts
