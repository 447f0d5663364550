# SPDX-License-Identifier: Apache-2.0
include(${CMAKE_CURRENT_LIST_DIR}/steps.cmake)

run(${configure} -B ${work_dir}/build -DKVCACHE_SOURCE=${source_dir})
run(${CMAKE_COMMAND} --build ${work_dir}/build)
run(${work_dir}/build/consumer ${version})

file(STRINGS ${work_dir}/build/CMakeCache.txt options REGEX "^KVCACHE_BUILD_[A-Z]+:BOOL=")
list(LENGTH options count)
if(count EQUAL 0 OR "${options}" MATCHES "=ON")
  message(FATAL_ERROR "tests, examples and benchmarks are to be off in a subdirectory: ${options}")
endif()
