// SPDX-License-Identifier: Apache-2.0
// Running the engine as a user does, with the random model.
#pragma once

#include "catch.hpp"
#include "random_model.hpp"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

namespace engine_test {

inline std::string read_file(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream out;
  out << in.rdbuf();
  return out.str();
}

/// A folder of its own, removed at the end.
class folder {
 public:
  folder() {
    std::string name = (std::filesystem::temp_directory_path() / "kvcache-engine-XXXXXX").string();
    REQUIRE(::mkdtemp(name.data()) != nullptr);
    path_ = name;
    const auto bytes = engine::random_model(1);
    write("model.gguf", {reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  }
  folder(const folder&) = delete;
  folder& operator=(const folder&) = delete;
  ~folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }

  std::string write(const std::string& name, std::string_view text) const {
    std::ofstream out(path_ / name, std::ios::binary);
    out.write(text.data(), static_cast<std::streamsize>(text.size()));
    return (path_ / name).string();
  }
  [[nodiscard]] std::string at(const std::string& name) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

struct outcome {
  int status = -1;
  std::string out;
  std::string err;
};

/// Runs the engine; arguments may hold anything but a single quote. `input` is its standard input; `before` is what the
/// shell does first.
inline outcome run(const folder& in, const std::vector<std::string>& arguments, const std::string& input = {},
                   const std::string& before = {}) {
  std::string command = before + "env -u KVCACHE_MODEL '" KVCACHE_ENGINE_EXECUTABLE "'";
  for (const std::string& a : arguments) command += " '" + a + "'";
  command += " <'" + in.write("stdin", input) + "' >'" + in.at("stdout") + "' 2>'" + in.at("stderr") + "'";
  const int status = std::system(command.c_str());
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, read_file(in.at("stdout")), read_file(in.at("stderr"))};
}

/// Start-up faults: exit status 2, nothing on stdout, one line on stderr that says why.
inline void refuses(const folder& in, const std::vector<std::string>& arguments, const std::string& why) {
  const outcome o = run(in, arguments);
  INFO(o.err);
  CHECK(o.status == 2);
  CHECK(o.out.empty());
  CHECK_THAT(o.err, kvcache_test::contains_text(why));
  CHECK(std::count(o.err.begin(), o.err.end(), '\n') <= 2);  // the random model is announced
}

}  // namespace engine_test
