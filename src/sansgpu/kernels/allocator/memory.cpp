// A caching allocator for large tensors: it maps blocks with mmap and reuses freed ones for tensors of similar size.
//
// glibc's aligned allocation cannot reuse a freed block for the same size, so an eager step touches twice its live
// memory. With this allocator it touches only live memory, in huge pages if the operating system has them. If tensor
// sizes change from step to step, blocks are cut from regions and merged again when freed; otherwise the cache would
// fill with blocks of every size.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>

namespace {

constexpr size_t kLarge = size_t{1} << 20;  // smaller tensors use torch's default allocator
constexpr size_t kHuge = size_t{2} << 20;   // a huge page; blocks of at least eight are rounded up to a multiple
constexpr size_t kStep = size_t{64} << 10;
constexpr double kWaste = 1.5;  // largest ratio of a reused block's size to the requested size
constexpr size_t kRegion = size_t{128} << 20;

size_t rounded(size_t bytes) {
  const size_t unit = bytes >= 8 * kHuge ? kHuge : kStep;
  return (bytes + unit - 1) / unit * unit;
}

void* map(size_t size) {
  void* block = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (block == MAP_FAILED) return nullptr;
#ifdef MADV_HUGEPAGE
  if (size >= 8 * kHuge) madvise(block, size, MADV_HUGEPAGE);
#endif
  return block;
}

class Memory {
 public:
  virtual ~Memory() = default;
  virtual void* take(size_t bytes) = 0;
  virtual bool put(void* block) = 0;  // returns false if the block is not from this allocator
  virtual int64_t give_back() = 0;
};

// Reuses a free block for a request of similar size.
class Blocks final : public Memory {
 public:
  void* take(size_t bytes) override {
    const size_t size = rounded(bytes);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto found = free_.lower_bound(size);
      if (found != free_.end() && found->first <= size * kWaste) {
        found = std::prev(free_.upper_bound(found->first));  // the block freed last may still be in cache
        void* block = found->second;
        used_[block] = found->first;
        free_.erase(found);
        return block;
      }
    }
    void* block = map(size);
    if (block == nullptr) {
      give_back();
      block = map(size);
      TORCH_CHECK(block != nullptr, "out of memory: ", bytes, " bytes cannot be had");
    }
    std::lock_guard<std::mutex> lock(mutex_);
    used_[block] = size;
    return block;
  }

  bool put(void* block) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = used_.find(block);
    if (found == used_.end()) return false;
    free_.emplace(found->second, block);
    used_.erase(found);
    return true;
  }

  int64_t give_back() override {
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

// Cuts blocks from large regions, best fit first. Freed blocks merge with adjacent free pieces.
class Regions final : public Memory {
 public:
  void* take(size_t bytes) override {
    const size_t size = (bytes + kStep - 1) / kStep * kStep;
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = by_size_.lower_bound({size, nullptr});
    if (found == by_size_.end()) found = grow(size);
    auto [whole, start] = *found;
    drop(start);
    if (whole > size) add(start + size, whole - size);
    used_[start] = size;
    return start;
  }

  bool put(void* block) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = used_.find(static_cast<char*>(block));
    if (found == used_.end()) return false;
    char* start = found->first;
    size_t size = found->second;
    used_.erase(found);
    const auto behind = free_.find(start + size);
    if (behind != free_.end() && regions_.count(behind->first) == 0) {
      size += behind->second;
      drop(behind->first);
    }
    auto before = free_.lower_bound(start);
    if (regions_.count(start) == 0 && before != free_.begin()) {
      --before;
      if (before->first + before->second == start) {
        start = before->first;
        size += before->second;
        drop(start);
      }
    }
    add(start, size);
    return true;
  }

  // Returns the pages of free pieces to the operating system; their address ranges stay reserved.
  int64_t give_back() override {
    std::lock_guard<std::mutex> lock(mutex_);
    int64_t given = 0;
    for (const auto& [start, size] : free_) {
      madvise(start, size, MADV_DONTNEED);
      given += static_cast<int64_t>(size);
    }
    return given;
  }

 private:
  std::set<std::pair<size_t, char*>>::iterator grow(size_t size) {
    const size_t length = (std::max(size, kRegion) + kHuge - 1) / kHuge * kHuge;
    char* region = static_cast<char*>(map(length));
    TORCH_CHECK(region != nullptr, "out of memory: ", size, " bytes cannot be had");
    regions_.insert(region);
    add(region, length);
    return by_size_.find({length, region});
  }

  void add(char* start, size_t size) {
    free_[start] = size;
    by_size_.insert({size, start});
  }

  void drop(char* start) {
    const auto found = free_.find(start);
    by_size_.erase({found->second, start});
    free_.erase(found);
  }

  std::mutex mutex_;
  std::set<char*> regions_;  // start addresses; pieces never merge across them
  std::map<char*, size_t> free_;
  std::set<std::pair<size_t, char*>> by_size_;
  std::unordered_map<char*, size_t> used_;
};

// Never destroyed, because tensors may be freed after static destructors have run.
Memory* const kinds[] = {new Blocks, new Regions};
bool varying = false;

void release(void* pointer) {
  if (pointer != nullptr && !kinds[0]->put(pointer) && !kinds[1]->put(pointer)) c10::GetDefaultCPUAllocator()->raw_deallocate(pointer);
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes < kLarge) return c10::GetDefaultCPUAllocator()->allocate(bytes);
    void* block = kinds[varying]->take(bytes);
    return {block, block, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }
};

void use_blocks(bool sizes_vary) {
  static Allocator allocator;
  varying = sizes_vary;
  c10::SetCPUAllocator(&allocator, /*priority=*/100);
}

int64_t give_back() { return kinds[0]->give_back() + kinds[1]->give_back(); }

}  // namespace

TORCH_LIBRARY_FRAGMENT(sansgpu, library) {
  library.def("use_blocks(bool varying) -> ()", &use_blocks);
  library.def("give_back() -> int", &give_back);
}
