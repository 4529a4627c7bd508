// Memory of large tensors: blocks straight from the kernel, kept when freed and used again for what is about as large.
//
// glibc's aligned allocation cannot use a freed block again for the same size, so an eager step touches twice the
// memory that is live in it. Here it touches what is live, in huge pages where the kernel has them.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <torch/library.h>

#include <cstdint>
#include <iterator>
#include <map>
#include <mutex>
#include <unordered_map>

namespace {

constexpr size_t kLarge = size_t{1} << 20;  // below, the C allocator serves
constexpr size_t kHuge = size_t{2} << 20;   // a huge page, which blocks of eight and more are multiples of
constexpr size_t kStep = size_t{64} << 10;
constexpr double kWaste = 1.5;  // of a block over what it is used for

size_t rounded(size_t bytes) {
  const size_t unit = bytes >= 8 * kHuge ? kHuge : kStep;
  return (bytes + unit - 1) / unit * unit;
}

class Blocks {
 public:
  void* take(size_t bytes) {
    const size_t size = rounded(bytes);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto found = free_.lower_bound(size);
      if (found != free_.end() && found->first <= size * kWaste) {
        found = std::prev(free_.upper_bound(found->first));  // what was freed last may still be in a cache
        void* block = found->second;
        used_[block] = found->first;
        free_.erase(found);
        return block;
      }
    }
    void* block = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (block == MAP_FAILED) {
      give_back();
      block = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      TORCH_CHECK(block != MAP_FAILED, "out of memory: ", bytes, " bytes cannot be had");
    }
#ifdef MADV_HUGEPAGE
    if (size >= 8 * kHuge) madvise(block, size, MADV_HUGEPAGE);
#endif
    std::lock_guard<std::mutex> lock(mutex_);
    used_[block] = size;
    return block;
  }

  // False where the block is not one of these.
  bool put(void* block) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = used_.find(block);
    if (found == used_.end()) return false;
    free_.emplace(found->second, block);
    used_.erase(found);
    return true;
  }

  int64_t give_back() {
    std::lock_guard<std::mutex> lock(mutex_);
    int64_t given = 0;
    for (const auto& [size, block] : free_) {
      munmap(block, size);
      given += static_cast<int64_t>(size);
    }
    free_.clear();
    return given;
  }

 private:
  std::mutex mutex_;
  std::multimap<size_t, void*> free_;
  std::unordered_map<void*, size_t> used_;
};

Blocks& blocks() {
  static Blocks* all = new Blocks;  // never destroyed: tensors may be freed after everything else
  return *all;
}

void release(void* pointer) {
  if (pointer != nullptr && !blocks().put(pointer)) c10::GetDefaultCPUAllocator()->raw_deallocate(pointer);
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes < kLarge) return c10::GetDefaultCPUAllocator()->allocate(bytes);
    void* block = blocks().take(bytes);
    return {block, block, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }
};

void use_blocks() {
  static Allocator allocator;
  c10::SetCPUAllocator(&allocator, /*priority=*/100);
}

int64_t give_back() { return blocks().give_back(); }

}  // namespace

TORCH_LIBRARY_FRAGMENT(sansgpu, library) {
  library.def("use_blocks() -> ()", &use_blocks);
  library.def("give_back() -> int", &give_back);
}
