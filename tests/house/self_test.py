#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Plants faults in a small tree and sees each house script find them.   usage: self_test.py COMPILER"""
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

import includes
import kernels
import layers
import macros
import snippets

LICENCE = "// SPDX-License-Identifier: Apache-2.0\n"
COMPILER = sys.argv.pop() if len(sys.argv) > 1 else "c++"

CLEAN = {
    "include/kvcache/kvcache.hpp": ["blocks/block_pool.hpp", "storage.hpp", "eviction/lru.hpp", "cache.hpp",
                                    "policies.hpp"],
    "include/kvcache/detail/config.hpp": [],
    "include/kvcache/fwd.hpp": [],
    "include/kvcache/dtype.hpp": ["detail/config.hpp"],
    "include/kvcache/types.hpp": ["detail/config.hpp"],
    "include/kvcache/policies.hpp": ["fwd.hpp", "dtype.hpp"],
    "include/kvcache/eviction/lru.hpp": ["types.hpp"],
    "include/kvcache/blocks/block_pool.hpp": ["types.hpp", "eviction/lru.hpp"],
    "include/kvcache/storage.hpp": ["types.hpp", "policies.hpp"],
    "include/kvcache/cache.hpp": ["blocks/block_pool.hpp", "storage.hpp"],
}


class planted_tree(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        for name, targets in CLEAN.items():
            self.write(name, "".join(f"#include <kvcache/{target}>\n" for target in targets))

    def write(self, name, text):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{LICENCE}#pragma once\n{text}" if name.endswith(".hpp") else text)

    def add(self, name, text):
        path = self.root / name
        path.write_text(path.read_text() + text)

    def assert_found(self, findings, *parts):
        findings = list(findings)
        self.assertEqual(len(findings), 1, findings)
        for part in parts:
            self.assertIn(part, findings[0])


class layers_test(planted_tree):
    def test_clean_tree_passes(self):
        self.assertEqual(layers.check(self.root), [])

    def test_edges_against_the_direction(self):
        for name, target in [("types.hpp", "policies.hpp"), ("types.hpp", "blocks/block_pool.hpp"),
                             ("detail/config.hpp", "fwd.hpp"), ("eviction/lru.hpp", "memory/aligned.hpp"),
                             ("eviction/lru.hpp", "eviction/fifo.hpp"), ("storage.hpp", "blocks/block_pool.hpp"),
                             ("blocks/block_pool.hpp", "attention/plan.hpp"), ("storage.hpp", "tier/host.hpp"),
                             ("cache.hpp", "schedule/scheduler.hpp"), ("schedule/scheduler.hpp", "cache.hpp"),
                             ("observe/stats.hpp", "cache.hpp"), ("cache.hpp", "kvcache.hpp"),
                             ("cache.hpp", "cuda/append.hpp"), ("cuda/append.hpp", "blocks/block_pool.hpp"),
                             ("quantise/codes.hpp", "storage.hpp")]:
            with self.subTest(name=name, target=target):
                texts = {f"kvcache/{name}": f"#include <kvcache/{target}>\n", f"kvcache/{target}": ""}
                self.assert_found(layers.check_edges(texts), f"kvcache/{name}", f"kvcache/{target}", "may include")

    def test_edges_along_the_direction(self):
        for name, target in [("schedule/scheduler.hpp", "blocks/block_manager.hpp"), ("cache.hpp", "storage.hpp"),
                             ("attention/cpu/kernel.hpp", "attention/plan.hpp"), ("cuda/append.cuh", "storage.hpp"),
                             ("storage.hpp", "layout/nhd.hpp"), ("types.hpp", "detail/bits.hpp"),
                             ("storage.hpp", "quantise/rotate.hpp"), ("quantise/codes.hpp", "dtype.hpp")]:
            with self.subTest(name=name, target=target):
                texts = {f"kvcache/{name}": f"#include <kvcache/{target}>\n", f"kvcache/{target}": ""}
                self.assertEqual(list(layers.check_edges(texts)), [])

    def test_policies_includes_only_two_headers(self):
        self.add("include/kvcache/policies.hpp", "#include <kvcache/types.hpp>\n")
        self.assert_found(layers.check(self.root), "policies.hpp", "types.hpp", "only")

    def test_missing_target(self):
        self.add("include/kvcache/cache.hpp", "#include <kvcache/nowhere.hpp>\n")
        self.assert_found(layers.check(self.root), "nowhere.hpp", "does not exist")

    def test_unknown_room(self):
        self.write("include/kvcache/attic/old.hpp", "#include <kvcache/types.hpp>\n")
        with self.assertRaisesRegex(KeyError, "attic"):
            layers.check(self.root)

    def test_cycle(self):
        self.add("include/kvcache/types.hpp", "#include <kvcache/dtype.hpp>\n")
        self.add("include/kvcache/dtype.hpp", "#include <kvcache/types.hpp>\n")
        self.assert_found(layers.check(self.root), "include each other", "dtype.hpp", "types.hpp")

    def test_umbrella_leaves_out_a_header(self):
        self.write("include/kvcache/views.hpp", "")
        self.assert_found(layers.check(self.root), "leaves out kvcache/views.hpp")

    def test_umbrella_brings_threads(self):
        self.add("include/kvcache/cache.hpp", "#include <thread>\n")
        self.assert_found(layers.check(self.root), "cache.hpp", "<thread>")

    def test_umbrella_brings_the_cpu_kernels(self):
        self.write("include/kvcache/attention/cpu/kernel.hpp", "")
        self.add("include/kvcache/kvcache.hpp", "#include <kvcache/attention/cpu/kernel.hpp>\n")
        self.assert_found(layers.check(self.root), "attention/cpu/kernel.hpp", "ask for it")

    def test_compiler_macro_outside_config(self):
        self.add("include/kvcache/types.hpp", "#if defined(__CUDACC__)\n#endif\n")
        self.assert_found(layers.check(self.root), "types.hpp", "__CUDACC__")

    def test_users_of_the_insides(self):
        self.write("tests/blocks/pool.cpp", "#include <kvcache/detail/config.hpp>\n")
        self.write("examples/own.cpp", "auto x = kvcache::detail::mix(1);\n")
        self.write("bench/fine.cpp", "// kvcache::detail:: is not for us\n")
        findings = layers.check(self.root)
        self.assertEqual([f.split()[0] for f in findings], ["tests/blocks/pool.cpp", "examples/own.cpp"])


class includes_test(planted_tree):
    def test_clean_tree_passes(self):
        self.assertEqual(includes.check(self.root), [])

    def test_forbidden_header(self):
        for header in ["iostream", "regex", "ranges", "format"]:
            with self.subTest(header=header):
                findings = includes.check_includes({"kvcache/types.hpp": f"#include <{header}>\n"})
                self.assert_found(findings, "types.hpp", f"<{header}>")

    def test_quoted_include(self):
        self.add("include/kvcache/cache.hpp", '#include "storage.hpp"\n')
        self.assert_found(includes.check(self.root), "cache.hpp", '"storage.hpp"')

    def test_macro_name(self):
        self.add("include/kvcache/types.hpp", "#  define ALWAYS 1\n#define KVCACHE_FINE 1\n")
        self.assert_found(includes.check(self.root), "types.hpp", "ALWAYS")

    def test_no_pragma_once(self):
        (self.root / "include/kvcache/types.hpp").write_text(LICENCE)
        self.assert_found(includes.check(self.root), "types.hpp", "#pragma once")

    def test_no_licence_line(self):
        self.write("bench/pool.cpp", "int main() {}\n")
        self.assert_found(includes.check(self.root), "bench/pool.cpp", "SPDX")


class macros_test(planted_tree):
    def check(self):
        return list(macros.check(self.root, COMPILER))

    def test_clean_tree_passes(self):
        self.add("include/kvcache/types.hpp", "#include <cstdint>\n#define KVCACHE_FINE 1\n")
        self.assertEqual(self.check(), [])

    def test_leftover(self):
        self.add("include/kvcache/types.hpp", "#include <cstdint>\n#define LEFT(x) x\n")
        self.assert_found(self.check(), "LEFT")

    def test_changed_and_undefined(self):
        self.add("include/kvcache/types.hpp", "#include <climits>\n#undef INT_MAX\n#undef CHAR_BIT\n#define CHAR_BIT 9\n")
        self.assertEqual(len(self.check()), 2)


class snippets_test(planted_tree):
    PAGE = "# Title\n<!-- snippet: examples/quickstart.cpp -->\n```cpp\nint main() {}\n```\n"

    def setUp(self):
        super().setUp()
        self.write("examples/quickstart.cpp", LICENCE + "\nint main() {}\n")
        self.write("README.md", self.PAGE)

    def test_identical(self):
        self.assertEqual(snippets.check(self.root), [])

    def test_differs_and_is_fixed(self):
        self.write("README.md", self.PAGE.replace("{}", "{ return 0; }"))
        self.assert_found(snippets.check(self.root), "README.md", "differs")
        self.assertEqual(snippets.check(self.root, fix=True), [])
        self.assertEqual((self.root / "README.md").read_text(), self.PAGE)

    def test_block_without_source(self):
        self.write("docs/page.md", "```cpp\nint x;\n```\n")
        self.assert_found(snippets.check(self.root), "docs/page.md", "names no source")

    def test_region(self):
        self.write("tests/a.cpp", LICENCE + "void f() {\n  // [call]\n  g();\n  // [call]\n}\n")
        self.write("README.md", "<!-- snippet: tests/a.cpp call -->\n```cpp\ng();\n```\n")
        self.assertEqual(snippets.check(self.root), [])
        self.write("README.md", "<!-- snippet: tests/a.cpp other -->\n```cpp\ng();\n```\n")
        self.assert_found(snippets.check(self.root), "README.md", "[other]")

    def test_missing_file(self):
        self.write("README.md", "<!-- snippet: examples/none.cpp -->\n```cpp\nint x;\n```\n")
        self.assert_found(snippets.check(self.root), "examples/none.cpp", "does not exist")


class kernels_test(planted_tree):
    TILE = "namespace kvcache::detail::isa_scalar {\nvoid run_tile(int) {}\n}\n"

    def compile(self, source, text):
        self.write(source, LICENCE + text)
        command = f"{COMPILER} -c {source} -o object.o"
        subprocess.run(command.split(), cwd=self.root, check=True)
        self.write("compile_commands.json",
                   json.dumps([{"file": source, "directory": str(self.root), "command": command}]))

    def test_no_kernels(self):
        self.compile("tests/a.cpp", "namespace kvcache::detail::isa_scalar {\nvoid run_tile(int);\n}\n"
                     "void f() { kvcache::detail::isa_scalar::run_tile(1); }\n")
        self.assertEqual(kernels.check(self.root), [])

    def test_kernels_again(self):
        self.compile("tests/a.cpp", self.TILE)
        self.assert_found(kernels.check(self.root), "tests/a.cpp", "cpu_kernels.hpp")

    def test_kernels_at_home(self):
        self.compile("tests/cpu_kernels.cpp", self.TILE)
        self.assertEqual(kernels.check(self.root), [])

    def test_what_is_not_built(self):
        self.compile("tests/a.cpp", self.TILE)
        (self.root / "object.o").unlink()
        self.assertEqual(kernels.check(self.root), [])


if __name__ == "__main__":
    unittest.main()
