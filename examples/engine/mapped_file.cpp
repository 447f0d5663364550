// SPDX-License-Identifier: Apache-2.0
#include "mapped_file.hpp"

#include "bad_input.hpp"

#include <cerrno>
#include <cstring>
#include <utility>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace engine {

mapped_file::mapped_file(const std::string& path) {
  // Without O_NONBLOCK a pipe would be waited for, until somebody writes into it.
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) throw bad_input("cannot open " + path + ": " + std::strerror(errno));
  struct stat status {};
  const char* fault = nullptr;
  if (::fstat(descriptor, &status) != 0)
    fault = std::strerror(errno);
  else if (!S_ISREG(status.st_mode))
    fault = "it is not a regular file";
  if (fault == nullptr && status.st_size > 0) {
    void* address = ::mmap(nullptr, static_cast<std::size_t>(status.st_size), PROT_READ, MAP_PRIVATE, descriptor, 0);
    if (address == MAP_FAILED) {
      fault = std::strerror(errno);
    } else {
      data_ = static_cast<const std::byte*>(address);
      size_ = static_cast<std::size_t>(status.st_size);
    }
  }
  ::close(descriptor);
  if (fault != nullptr) throw bad_input("cannot map " + path + ": " + fault);
}

mapped_file::mapped_file(mapped_file&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

mapped_file& mapped_file::operator=(mapped_file&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

mapped_file::~mapped_file() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

}  // namespace engine
