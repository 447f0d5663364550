# SPDX-License-Identifier: Apache-2.0
# The version is written once, in version.hpp; CMake reads it from there.

# kvcache_read_version(HEADER VAR): sets VAR to "major.minor.patch".
function(kvcache_read_version header variable)
  file(STRINGS ${header} lines REGEX "KVCACHE_VERSION_(MAJOR|MINOR|PATCH)[ \t]+[0-9]+")
  foreach(part IN ITEMS MAJOR MINOR PATCH)
    if(NOT "${lines}" MATCHES "KVCACHE_VERSION_${part}[ \t]+([0-9]+)")
      message(FATAL_ERROR "${header} does not define KVCACHE_VERSION_${part} as a number")
    endif()
    list(APPEND numbers ${CMAKE_MATCH_1})
  endforeach()
  list(JOIN numbers "." version)
  set(${variable} ${version} PARENT_SCOPE)
endfunction()
