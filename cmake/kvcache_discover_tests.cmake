# SPDX-License-Identifier: Apache-2.0
# Script: asks a Catch2 executable (2 or 3) for its test cases and writes one add_test line for each.
# In: executable, list_file, labels, timeout, working_dir, emulator (a list, empty where the program runs as it is). Runs
# at the end of the executable's build. A test that prints "SKIPPED: why" counts as skipped.

# Catch2 2 passes when a name matches nothing, unless told to warn; 3 fails by itself.
set(strict "--warn NoTests")
execute_process(COMMAND ${emulator} ${executable} --list-test-names-only OUTPUT_VARIABLE names RESULT_VARIABLE status
                ERROR_QUIET WORKING_DIRECTORY ${working_dir})
if(NOT status MATCHES "^[0-9]+$" OR names STREQUAL "" OR names MATCHES "Unrecogni[sz]ed token")
  set(strict "")
  execute_process(COMMAND ${emulator} ${executable} --list-tests --verbosity quiet OUTPUT_VARIABLE names
                  ERROR_VARIABLE errors RESULT_VARIABLE status WORKING_DIRECTORY ${working_dir})
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "${executable} cannot list its tests (${status}): ${names}${errors}")
  endif()
endif()

# Square brackets and semicolons would split or join list items.
string(REPLACE "[" "<kvcache-open>" names "${names}")
string(REPLACE "]" "<kvcache-close>" names "${names}")
string(REPLACE ";" "<kvcache-semicolon>" names "${names}")
string(REPLACE "\n" ";" names "${names}")

set(command "")
foreach(word IN LISTS emulator executable)
  string(APPEND command " [====[${word}]====]")
endforeach()

set(script "")
foreach(name IN LISTS names)
  string(STRIP "${name}" name)
  if(name STREQUAL "")
    continue()
  endif()
  string(REPLACE "<kvcache-open>" "[" name "${name}")
  string(REPLACE "<kvcache-close>" "]" name "${name}")
  string(REPLACE "<kvcache-semicolon>" ";" name "${name}")
  set(spec "${name}")
  foreach(special IN ITEMS "\\" "," "\"")
    string(REPLACE "${special}" "\\${special}" spec "${spec}")
  endforeach()
  string(REPLACE "[" "\\[" spec "${spec}")
  string(REPLACE "]" "\\]" spec "${spec}")
  # Not an option, not an exclusion.
  string(REGEX REPLACE "^([-~])" "\\\\\\1" spec "${spec}")
  string(APPEND script
         "add_test([====[${name}]====]${command} [====[${spec}]====] ${strict})\n"
         "set_tests_properties([====[${name}]====] PROPERTIES LABELS [====[${labels}]====]"
         " TIMEOUT ${timeout} SKIP_REGULAR_EXPRESSION [====[SKIPPED:]====] WORKING_DIRECTORY [====[${working_dir}]====])\n")
endforeach()
if(script STREQUAL "")
  message(FATAL_ERROR "${executable} holds no test case")
endif()
file(WRITE ${list_file} "${script}")
