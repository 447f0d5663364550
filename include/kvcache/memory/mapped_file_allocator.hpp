// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/concepts.hpp>
#include <kvcache/error.hpp>
#include <kvcache/types.hpp>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

namespace kvcache {

struct mapped_file_options {
  /// Leave the file behind. Otherwise it has no name once it is mapped and vanishes with the pool, or with the process.
  bool keep = false;
  /// Reserve the file's blocks at once, so that a full disk is an error of `allocate` and not a SIGBUS on a later
  /// write. On a file system in memory this takes the memory at once; without it the file is sparse.
  bool reserve = true;
};

/// Memory backed by a file, for pools larger than the host's memory: the system writes cold pages to the file and reads
/// them back on demand. Pages are zero and become resident when they are first touched. Thread safe.
class mapped_file_allocator {
 public:
  static constexpr const char* name = "mapped_file";
  static constexpr memory_space space = memory_space::host;

  /// The file is created by `allocate`, which refuses a path that exists: a pool never writes over somebody's file.
  explicit mapped_file_allocator(std::string path, mapped_file_options options = {}) noexcept
      : path_(std::move(path)), options_(options) {}

  /// Memory for `bytes` bytes; `alignment` is a power of two up to the system's page size, else invalid_argument.
  /// Raises system_failure, and leaves no file, where the file cannot be created, grown or mapped.
  [[nodiscard]] void* allocate(std::size_t bytes, std::size_t alignment) {
    const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    if (alignment > page)
      detail::raise<invalid_argument>("mapped_file_allocator: alignment " + std::to_string(alignment) +
                                      " asked for, mappings have " + std::to_string(page) +
                                      "; ask for less, or take another allocator");
    const std::size_t length = bytes == 0 ? 1 : bytes;
    if (length > static_cast<std::size_t>((std::numeric_limits<::off_t>::max)())) refuse("grow", bytes, EFBIG);

    // Growing beyond the process's limit would end it by a signal, not by an error.
    ::rlimit limit{};
    if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && length > limit.rlim_cur)
      refuse("grow", bytes, EFBIG);

    const int file = ::open(path_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (file < 0) refuse("create", bytes, errno);
    if (const int code = grow(file, static_cast<::off_t>(length)); code != 0) {
      abandon(file);
      refuse("grow", bytes, code);
    }
    void* const memory = ::mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory == MAP_FAILED) {
      const int code = errno;
      abandon(file);
      refuse("map", bytes, code);
    }
    ::close(file);  // the mapping holds the file
    if (!options_.keep) ::unlink(path_.c_str());
    return memory;
  }

  void deallocate(void* memory, std::size_t bytes, std::size_t /*alignment*/) noexcept {
    ::munmap(memory, bytes == 0 ? 1 : bytes);
  }

 private:
  /// 0 or the error's number.
  [[nodiscard]] int grow(int file, ::off_t length) const noexcept {
    int code = 0;
    do {
      if (options_.reserve)
        code = ::posix_fallocate(file, 0, length);
      else
        code = ::ftruncate(file, length) == 0 ? 0 : errno;
    } while (code == EINTR);
    return code;
  }

  void abandon(int file) const noexcept {
    ::close(file);
    ::unlink(path_.c_str());
  }

  [[noreturn]] void refuse(const char* what, std::size_t bytes, int code) const {
    detail::raise<system_failure>("mapped_file_allocator: cannot " + std::string(what) + " '" + path_ + "' for " +
                                  std::to_string(bytes) + " bytes: " + std::strerror(code) +
                                  "; name a new file on a disk with room");
  }

  std::string path_;
  mapped_file_options options_;
};

static_assert(memory_allocator<mapped_file_allocator>);

}  // namespace kvcache
