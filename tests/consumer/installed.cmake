# SPDX-License-Identifier: Apache-2.0
include(${CMAKE_CURRENT_LIST_DIR}/steps.cmake)

run(${CMAKE_COMMAND} --install ${build_dir} --prefix ${work_dir}/prefix)
list(APPEND configure -DCMAKE_PREFIX_PATH=${work_dir}/prefix -DCMAKE_FIND_USE_PACKAGE_REGISTRY=OFF)

run(${configure} -B ${work_dir}/build -DKVCACHE_WANTED=0.1)
run(${CMAKE_COMMAND} --build ${work_dir}/build)
run(${work_dir}/build/consumer ${version})

# Another minor version may differ in its interface before 1.0.
string(REGEX MATCH "^([0-9]+)\\.([0-9]+)" numbers ${version})
math(EXPR next_minor "${CMAKE_MATCH_2} + 1")
expect_failure("compatible with requested version \"${CMAKE_MATCH_1}.${next_minor}\""
               ${configure} -B ${work_dir}/newer -DKVCACHE_WANTED=${CMAKE_MATCH_1}.${next_minor})
expect_failure("compatible with requested version \"99.0\""
               ${configure} -B ${work_dir}/much_newer -DKVCACHE_WANTED=99.0)
