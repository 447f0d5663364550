# SPDX-License-Identifier: Apache-2.0
# Functions for the project's own tests, benchmarks and examples.

if(PROJECT_IS_TOP_LEVEL)
  if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
    set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
  endif()
  if(NOT DEFINED CMAKE_CXX_COMPILER_LAUNCHER)
    find_program(KVCACHE_CCACHE ccache)
    mark_as_advanced(KVCACHE_CCACHE)
    if(KVCACHE_CCACHE)
      set(CMAKE_CXX_COMPILER_LAUNCHER ${KVCACHE_CCACHE})
    endif()
  endif()
endif()

# What every target of ours is compiled with: strict warnings, and checks on in Debug.
add_library(kvcache_strict INTERFACE)
target_compile_options(kvcache_strict INTERFACE
  -Wall -Wextra -Wpedantic -Wshadow -Wconversion $<$<BOOL:${KVCACHE_WARNINGS_AS_ERRORS}>:-Werror>)
target_compile_definitions(kvcache_strict INTERFACE
  $<$<CONFIG:Debug>:KVCACHE_CHECKS=1> $<$<CONFIG:Debug>:_GLIBCXX_ASSERTIONS>)

function(kvcache_setup_target target)
  target_link_libraries(${target} PRIVATE kvcache::kvcache kvcache_strict)
  set_target_properties(${target} PROPERTIES CXX_EXTENSIONS OFF)
endfunction()

# The CPU kernels for every pair of types that our own programs use. They are most of what these take to compile, so it
# is done once: tests include cpu_kernels.hpp, which says that they are elsewhere; examples, which show what a user
# writes, and benchmarks have it included by kvcache_share_kernels.
set(KVCACHE_KERNELS ${PROJECT_SOURCE_DIR}/tests/support/cpu_kernels)
add_library(kvcache_kernels STATIC EXCLUDE_FROM_ALL ${KVCACHE_KERNELS}.cpp)
kvcache_setup_target(kvcache_kernels)

# kvcache_share_kernels(TARGET SOURCES file...): these files of the target take kvcache_kernels and compile none.
function(kvcache_share_kernels target)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES")
  target_link_libraries(${target} PRIVATE kvcache_kernels)
  set_property(SOURCE ${arg_SOURCES} APPEND PROPERTY COMPILE_OPTIONS -include ${KVCACHE_KERNELS}.hpp)
endfunction()

# The tests that ThreadSanitizer is for: those with the label threads.
add_custom_target(kvcache_threaded_tests)
# The tests that are run on every kind of processor: those with the label processor.
add_custom_target(kvcache_processor_tests)

# kvcache_add_test(NAME SOURCES file... [LABELS label...] [LIBRARIES library...] [DEFINITIONS definition...]
#                  [OPTIONS flag...] [TIMEOUT seconds] [TOGETHER])
# One executable, registered in ctest test case by test case. LABELS are labels for `ctest -L`; the label threads
# also asks for a ThreadSanitizer run, and processor for one on other processors. OPTIONS are compiler flags, say
# -ffast-math or -fno-exceptions. TOGETHER: the files are compiled as one, which takes a fraction of the time where they
# use the same templates; their names have to differ.
function(kvcache_add_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "TOGETHER" "TIMEOUT" "SOURCES;LABELS;LIBRARIES;DEFINITIONS;OPTIONS")
  if(arg_UNPARSED_ARGUMENTS OR NOT arg_SOURCES)
    message(FATAL_ERROR "kvcache_add_test(${name}): give SOURCES; not understood: '${arg_UNPARSED_ARGUMENTS}'")
  endif()
  set(known core prefix eviction scheduler cuda dtype tier group package model gpu threads processor)
  foreach(label IN LISTS arg_LABELS)
    if(NOT label IN_LIST known)
      message(FATAL_ERROR "kvcache_add_test(${name}): unknown label '${label}'; known are: ${known}")
    endif()
  endforeach()
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 900)
  endif()

  add_executable(${name} ${arg_SOURCES})
  kvcache_setup_target(${name})
  target_link_libraries(${name} PRIVATE kvcache_test_main ${arg_LIBRARIES})
  target_compile_definitions(${name} PRIVATE ${arg_DEFINITIONS})
  target_compile_options(${name} PRIVATE ${arg_OPTIONS})
  set_target_properties(${name} PROPERTIES UNITY_BUILD ${arg_TOGETHER} UNITY_BUILD_BATCH_SIZE 8)

  if(threads IN_LIST arg_LABELS)
    add_dependencies(kvcache_threaded_tests ${name})
  endif()
  if(processor IN_LIST arg_LABELS)
    add_dependencies(kvcache_processor_tests ${name})
  endif()

  set(list_file ${CMAKE_CURRENT_BINARY_DIR}/${name}_tests.cmake)
  add_custom_command(
    TARGET ${name} POST_BUILD
    COMMAND ${CMAKE_COMMAND} -D "executable=$<TARGET_FILE:${name}>" -D "list_file=${list_file}"
            -D "labels=${arg_LABELS}" -D "timeout=${arg_TIMEOUT}"
            -D "working_dir=${CMAKE_CURRENT_SOURCE_DIR}" -D "emulator=${CMAKE_CROSSCOMPILING_EMULATOR}"
            -P ${PROJECT_SOURCE_DIR}/cmake/kvcache_discover_tests.cmake
    BYPRODUCTS ${list_file}
    VERBATIM)
  set(include_file ${CMAKE_CURRENT_BINARY_DIR}/${name}_include.cmake)
  file(WRITE ${include_file}
       "if(EXISTS \"${list_file}\")\n  include(\"${list_file}\")\nelse()\n"
       "  add_test([==[${name} is not built]==] \"${name}_not_built\")\nendif()\n")
  set_property(DIRECTORY APPEND PROPERTY TEST_INCLUDE_FILES ${include_file})
endfunction()

# kvcache_add_example(NAME SOURCES file... [LIBRARIES library...])
function(kvcache_add_example name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES;LIBRARIES")
  add_executable(${name} ${arg_SOURCES})
  kvcache_setup_target(${name})
  target_link_libraries(${name} PRIVATE ${arg_LIBRARIES})
endfunction()

# kvcache_add_bench(NAME SOURCES file... [LIBRARIES library...]): links Google Benchmark and its main.
function(kvcache_add_bench name)
  kvcache_add_example(${name} ${ARGN})
  target_link_libraries(${name} PRIVATE benchmark::benchmark_main)
endfunction()
