# SPDX-License-Identifier: Apache-2.0
# Shared by the consumer scripts. In: source_dir, build_dir, work_dir, version, generator, compiler, launcher.

# run(COMMAND...): stops the test with the output when the command fails.
function(run)
  execute_process(COMMAND ${ARGV} RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT status EQUAL 0)
    list(JOIN ARGV " " command)
    message(FATAL_ERROR "failed (${status}): ${command}\n${output}")
  endif()
endfunction()

# expect_failure(TEXT COMMAND...): stops the test unless the command fails and says TEXT.
function(expect_failure text)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  string(REGEX REPLACE "[ \n]+" " " output "${output}")
  string(FIND "${output}" "${text}" position)
  list(JOIN ARGN " " command)
  if(status EQUAL 0)
    message(FATAL_ERROR "was expected to fail: ${command}\n${output}")
  elseif(position EQUAL -1)
    message(FATAL_ERROR "failed without saying '${text}': ${command}\n${output}")
  endif()
endfunction()

file(REMOVE_RECURSE ${work_dir})
file(MAKE_DIRECTORY ${work_dir})
set(configure ${CMAKE_COMMAND} -G ${generator} -S ${CMAKE_CURRENT_LIST_DIR}/project -DCMAKE_BUILD_TYPE=Release
              -DCMAKE_CXX_COMPILER=${compiler} -DCMAKE_CXX_COMPILER_LAUNCHER=${launcher})
