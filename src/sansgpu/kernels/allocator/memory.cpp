// A caching allocator for large tensors. It maps blocks with mmap and reuses freed blocks for tensors of similar size.
//
// torch's CPU allocator in libc10.so calls the C library's posix_memalign and free through its table of imported
// functions. `install` replaces these two entries, so the allocator works with every version of torch for x86-64 Linux.
//
// glibc's aligned allocation cannot reuse a freed block for the same size, so an eager step touches twice its live
// memory. With this allocator, it touches only its live memory, in huge pages if the operating system provides them. If
// tensor sizes change from step to step, blocks are cut from larger regions and merged again when they are freed;
// otherwise the cache would fill with blocks of every size.

#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>

#include "../native.h"

namespace {

constexpr size_t kLarge = size_t{1} << 20;  // smaller tensors use torch's default allocator
constexpr size_t kHuge = size_t{2} << 20;   // a huge page; blocks of at least eight are rounded up to whole huge pages
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
  virtual void* take(size_t bytes) = 0;  // returns nullptr if memory runs out
  virtual bool put(void* block) = 0;  // returns false if this allocator did not allocate the block
  virtual int64_t give_back() = 0;
};

// Reuses whole free blocks for requests of similar size.
class Blocks final : public Memory {
 public:
  void* take(size_t bytes) override {
    const size_t size = rounded(bytes);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto found = free_.lower_bound(size);
      if (found != free_.end() && found->first <= size * kWaste) {
        found = std::prev(free_.upper_bound(found->first));  // the most recently freed block may still be in cache
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
      if (block == nullptr) return nullptr;
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
    if (found == by_size_.end()) return nullptr;
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
    if (region == nullptr) return by_size_.end();
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
std::atomic<bool> varying{false};

int allocate(void** pointer, size_t alignment, size_t bytes) {
  if (bytes < kLarge || alignment > kStep) return posix_memalign(pointer, alignment, bytes);
  void* block = kinds[varying]->take(bytes);
  if (block == nullptr) return ENOMEM;
  *pointer = block;
  return 0;
}

void release(void* pointer) {
  // Blocks of this allocator start at a page boundary, so most pointers of the C library are recognized without a
  // search.
  const bool starts_page = reinterpret_cast<uintptr_t>(pointer) % 4096 == 0;
  if (!starts_page || pointer == nullptr || !(kinds[0]->put(pointer) || kinds[1]->put(pointer))) free(pointer);
}

// The parts of a loaded library's dynamic section that list the functions it imports.
struct Imports {
  const ElfW(Sym)* symbols = nullptr;
  const char* names = nullptr;
  const ElfW(Rela)* relocations[2] = {nullptr, nullptr};  // the sections .rela.dyn and .rela.plt
  size_t bytes[2] = {0, 0};                                // their sizes
};

Imports imports_of(const dl_phdr_info& library) {
  Imports found;
  for (int i = 0; i < library.dlpi_phnum; ++i) {
    if (library.dlpi_phdr[i].p_type != PT_DYNAMIC) continue;
    auto* entry = reinterpret_cast<const ElfW(Dyn)*>(library.dlpi_addr + library.dlpi_phdr[i].p_vaddr);
    for (; entry->d_tag != DT_NULL; ++entry) {
      const auto address = entry->d_un.d_ptr;  // glibc has already added the library's base address
      if (entry->d_tag == DT_SYMTAB) found.symbols = reinterpret_cast<const ElfW(Sym)*>(address);
      if (entry->d_tag == DT_STRTAB) found.names = reinterpret_cast<const char*>(address);
      if (entry->d_tag == DT_RELA) found.relocations[0] = reinterpret_cast<const ElfW(Rela)*>(address);
      if (entry->d_tag == DT_RELASZ) found.bytes[0] = entry->d_un.d_val;
      if (entry->d_tag == DT_JMPREL) found.relocations[1] = reinterpret_cast<const ElfW(Rela)*>(address);
      if (entry->d_tag == DT_PLTRELSZ) found.bytes[1] = entry->d_un.d_val;
    }
  }
  return found;
}

// Writes `function` to a slot of an import table, which may be read-only. Returns false if the system does not allow
// it.
bool replace(void** slot, void* function) {
  const uintptr_t page = sysconf(_SC_PAGESIZE), start = reinterpret_cast<uintptr_t>(slot) / page * page;
  if (mprotect(reinterpret_cast<void*>(start), page, PROT_READ | PROT_WRITE) != 0) return false;
  __atomic_store_n(slot, function, __ATOMIC_RELEASE);
  return true;
}

// Calls visit(name, slot) for each function or variable that a library imports.
template <typename F>
void each_import(const dl_phdr_info& library, const F& visit) {
  const Imports imports = imports_of(library);
  if (imports.symbols == nullptr || imports.names == nullptr) return;
  for (int kind = 0; kind < 2; ++kind) {
    const auto* end = imports.relocations[kind] + imports.bytes[kind] / sizeof(ElfW(Rela));
    for (auto* relocation = imports.relocations[kind]; relocation != end; ++relocation) {
      const auto& symbol = imports.symbols[ELF64_R_SYM(relocation->r_info)];
      if (symbol.st_shndx == SHN_UNDEF)
        visit(imports.names + symbol.st_name, reinterpret_cast<void**>(library.dlpi_addr + relocation->r_offset));
    }
  }
}

// Replaces the allocation functions that torch's library imports. `data` points to the number of replaced slots of
// posix_memalign. `free` is replaced first, because the C library must never free a block of this allocator.
int replace_in_torch(dl_phdr_info* library, size_t, void* data) {
  const char* file = std::strrchr(library->dlpi_name, '/');
  if (file == nullptr || std::strcmp(file, "/libc10.so") != 0) return 0;
  int64_t& allocating = *static_cast<int64_t*>(data);
  each_import(*library, [&](const char* name, void** slot) {
    if (std::strcmp(name, "free") == 0 && !replace(slot, reinterpret_cast<void*>(&release))) allocating = -1;
  });
  each_import(*library, [&](const char* name, void** slot) {
    if (allocating >= 0 && std::strcmp(name, "posix_memalign") == 0)
      allocating += replace(slot, reinterpret_cast<void*>(&allocate));
  });
  return 1;
}

}  // namespace

// Makes torch allocate large CPU tensors with this allocator. Set `sizes_vary` if their sizes change from step to step.
// Returns whether torch's library was found and its imports were replaced.
SANSGPU_KERNEL int64_t install(int64_t sizes_vary) {
  static int64_t allocating = 0;
  varying = sizes_vary != 0;
  if (allocating == 0) dl_iterate_phdr(&replace_in_torch, &allocating);
  return allocating > 0;
}

// Returns the memory of freed tensors to the operating system, and returns its size in bytes.
SANSGPU_KERNEL int64_t give_back() { return kinds[0]->give_back() + kinds[1]->give_back(); }
