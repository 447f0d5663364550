# SPDX-License-Identifier: Apache-2.0
# Script: compiles a source that breaks one requirement. The compiler's errors have to be one, and that one the sentence
# of the source's first line. In: compiler, compiler_id, include, source.

file(READ ${source} text)
string(REGEX MATCH "^// expected: ([^\n]*)" line "${text}")
set(sentence "${CMAKE_MATCH_1}")

# Carets would print the source of the message beside the message.
if(compiler_id MATCHES "Clang")
  set(plain -fno-caret-diagnostics -fno-color-diagnostics)
else()
  set(plain -fno-diagnostics-show-caret -fdiagnostics-color=never)
endif()
execute_process(COMMAND ${compiler} -std=c++20 ${plain} -I${include} -fsyntax-only ${source}
                ERROR_VARIABLE errors RESULT_VARIABLE status)

# count(TEXT PART VARIABLE): how often PART stands in TEXT.
function(count text part variable)
  string(LENGTH "${text}" whole)
  string(LENGTH "${part}" step)
  string(REPLACE "${part}" "" rest "${text}")
  string(LENGTH "${rest}" rest)
  math(EXPR found "(${whole} - ${rest}) / ${step}")
  set(${variable} ${found} PARENT_SCOPE)
endfunction()

if(sentence STREQUAL "")
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "${source} should compile:\n${errors}")
  endif()
  return()
endif()
if(status EQUAL 0)
  message(FATAL_ERROR "${source} compiles, though it should be refused by: ${sentence}")
endif()
count("${errors}" "${sentence}" sentences)
count("${errors}" "error:" faults)
if(NOT sentences EQUAL 1 OR NOT faults EQUAL 1)
  message(FATAL_ERROR "expected one error with the sentence\n${sentence}\nfound the sentence ${sentences} times among "
                      "${faults} errors:\n${errors}")
endif()
