# SPDX-License-Identifier: Apache-2.0
# Script: `source` must not compile, with exactly one error, which contains `message`. In: compiler, include, source.
execute_process(COMMAND ${compiler} -std=c++20 -fsyntax-only -I${include} ${source}
                RESULT_VARIABLE status ERROR_VARIABLE text OUTPUT_QUIET)
if(status EQUAL 0)
  message(FATAL_ERROR "${source} compiles, but must not")
endif()
string(REGEX MATCHALL "error: " errors "${text}")
list(LENGTH errors count)
string(FIND "${text}" "${message}" found)
if(NOT count EQUAL 1 OR found EQUAL -1)
  message(FATAL_ERROR "expected one error that says '${message}', got ${count}:\n${text}")
endif()
