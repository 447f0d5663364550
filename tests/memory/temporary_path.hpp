// SPDX-License-Identifier: Apache-2.0
// A path for one test's file, which is removed afterwards.
#pragma once

#include <atomic>
#include <filesystem>
#include <string>
#include <system_error>

#include <unistd.h>

namespace kvcache_test {

class temporary_path {
 public:
  temporary_path() {
    static std::atomic<int> number{0};
    path_ = std::filesystem::temp_directory_path() /
            ("kvcache_test_" + std::to_string(::getpid()) + "_" + std::to_string(number++));
  }
  temporary_path(const temporary_path&) = delete;
  temporary_path& operator=(const temporary_path&) = delete;
  ~temporary_path() {
    std::error_code ignored;
    std::filesystem::remove(path_, ignored);
  }

  [[nodiscard]] std::string string() const { return path_.string(); }
  [[nodiscard]] bool exists() const { return std::filesystem::exists(path_); }

 private:
  std::filesystem::path path_;
};

}  // namespace kvcache_test
